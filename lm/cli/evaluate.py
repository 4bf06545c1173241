"""Score a model: lm-lab evaluate run_dir=RUN [data=text data.path=FILE]

Without data, on the validation text of the run; with it, on all of the given text, in windows as long as the model's
context. run_dir=[RUN1,RUN2] or a glob scores several runs, texts=[FILE1,FILE2] or a glob several texts. details=true
adds the loss by the frequency of the target, plot=FILE.svg draws it. document_mask=true scores each
document without those before it, document_mask=false with them; the default is as in training. The table goes to
standard error, the same numbers as JSON to standard output.
"""

import json
import shlex
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lm.cli.compose import compose, parse
from lm.cli.main import handle_exception
from lm.cli.mistakes import kinds_of
from lm.cli.summaries import detail_tables, score_table
from lm.cli.words import is_folder, is_text, runs_of, split_words, with_folders, with_text
from lm.config import DataConfig, EvaluateConfig, RunConfig, TokenizerConfig, UserError
from lm.config.checks import error_prefix, without_secrets
from lm.data.paths import check_paths, is_url, listed, local_files
from lm.system.terminal import format_table

SCHEMA = EvaluateConfig


def run(args: list[str]) -> int:
    return score(parse_arguments(args))


def score(config: EvaluateConfig) -> int:
    pairs = _pairs_of(config)  # raises UserError before the slow imports below
    if config.plot is not None and not (folder := Path(config.plot).parent).is_dir():
        raise UserError(f"plot={config.plot}: {folder} is no folder")
    from lm.inference.evaluate import Inputs, check, evaluate_run

    for pair in pairs:
        check(pair)
    several = config.texts is not None or config.run_dir not in (None, pairs[0].run_dir)
    bar = sys.stderr.isatty()
    scores, failed, inputs = list[dict[str, Any]](), list[UserError](), Inputs()
    for pair in tqdm(pairs, "texts", leave=False, disable=not bar or len(pairs) == 1):
        text = "validation text" if pair.data is None else without_secrets(pair.data.path or pair.data.source)
        try:
            with error_prefix(f"run_dir={pair.run_dir}, {text}") if several else nullcontext():
                scores.append({"run": pair.run_dir, "text": text, **evaluate_run(pair, bar, inputs)})
        except UserError as error:  # the others are scored all the same
            failed.append(error)
    if not scores:
        raise failed[0]
    print(format_table(score_table(scores, several)), file=sys.stderr)
    for title, rows in detail_tables(scores, several):
        print("", title, format_table(rows), sep="\n", file=sys.stderr)
    if config.plot is not None:
        from lm.report.figures import save
        from lm.runs.curves import draw_scores  # matplotlib takes a second, and few ask for a figure

        save(lambda: draw_scores(scores), Path(config.plot))
    print(json.dumps(scores if several else {k: v for k, v in scores[0].items() if k not in ("run", "text")}))
    return max(map(handle_exception, failed), default=0)


def parse_arguments(args: list[str]) -> EvaluateConfig:
    """The configuration; its group `data` is composed as train does. A folder is the run, a file the text.

    Raises UserError.
    """
    words, settings = split_words(args, EvaluateConfig)
    runs = [*filter(is_folder, words)]
    texts = [word for word in words if word not in runs]
    if len(texts) > 1 and all(map(is_text, texts)):
        several = shlex.quote(f"texts=[{','.join(texts)}]")
        raise UserError(f"{texts[1]}: is a second text; did you mean {several}?")
    args = with_folders(runs, with_text([*texts, *settings], kinds_of(EvaluateConfig)) if texts else settings)
    data = [arg for arg in args if arg.lstrip("+").startswith(("data=", "data."))]
    if data and not any(arg.startswith("data=") for arg in data):
        raise UserError(f"{data[0]}: choose a kind of text with it, as in data=text data.path=FILE")
    text = compose("train", data, RunConfig).data if data else None
    return parse(EvaluateConfig, [arg for arg in args if arg not in data], data=text)


def _pairs_of(config: EvaluateConfig) -> list[EvaluateConfig]:
    """A configuration of one run and one text for each pair that is asked for. Raises UserError."""
    runs, texts = runs_of(config.run_dir), [config.data]
    if config.texts is not None:
        texts = [DataConfig(source="text", path=path) for path in listed(config.texts, "texts")]
    for text in texts:
        if config.data is not None:
            check_paths(config.data, TokenizerConfig())
        elif text is not None and not is_url(str(text.path)):
            local_files(str(text.path), key="texts")
    return [replace(config, run_dir=name, data=text, texts=None) for name in runs for text in texts]
