"""Score a model: lm-lab evaluate run_dir=RUN [data=text data.path=FILE]

Without data, on the validation text of the run; with it, on all of the given text, in windows as long as the model's
context. run_dir=[RUN1,RUN2] or a glob scores several runs, texts=[FILE1,FILE2] or a glob several texts. details=true
adds calibration and the loss by the frequency of the target, plot=FILE.svg draws them. document_mask=true scores each
document without those before it, document_mask=false with them; the default is as in training. The table goes to
standard error, the same numbers as JSON to standard output.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lm.cli.errors import report
from lm.cli.imports import heavy_imports
from lm.cli.launch import launch
from lm.cli.scores import detail_tables, score_table
from lm.config import BadInput, DataConfig, EvaluateConfig, TokenizerConfig
from lm.data.paths import check_paths, is_url, listed, local_files
from lm.exchange.find_model import model_folder
from lm.system.terminal import format_table


def one_by_one(config: EvaluateConfig) -> list[EvaluateConfig]:
    """A configuration of one run and one text for each pair that this one asks for. Raises BadInput."""
    runs = listed(config.run_dir, "run_dir", folders=True)
    texts = [config.data]
    if config.texts is not None:
        paths = listed(config.texts, "texts")
        for path in paths:
            if not is_url(path):
                local_files(path, key="texts")
        texts = [DataConfig(source="text", path=path) for path in paths]
    elif config.data is not None:
        check_paths(config.data, TokenizerConfig())
    for run in runs:
        model_folder(run)
    return [replace(config, run_dir=run, data=text, texts=None) for run in runs for text in texts]


def name_of(text: DataConfig | None) -> str:
    return "validation text" if text is None else text.path or text.source


def draw(found: list[dict[str, Any]], path: Path) -> None:
    from lm.cli import scores_figure  # matplotlib takes a second, and few ask for a figure

    scores_figure.draw(found, path)


def task(config: EvaluateConfig) -> int:
    each = one_by_one(config)  # raises BadInput before the slow imports below
    if config.plot is not None and not (folder := Path(config.plot).expanduser().parent).is_dir():
        raise BadInput(f"plot={config.plot}: {folder} is no folder")
    with heavy_imports():
        from lm.inference.evaluate import check, evaluate_run

    for one in each:
        check(one)
    several, bar = config.texts is not None or each[0].run_dir != config.run_dir, sys.stderr.isatty()
    found: list[dict[str, Any]] = []
    failed: list[BadInput] = []
    for one in tqdm(each, "texts", leave=False, disable=not bar or len(each) == 1):
        try:
            found.append({"run": one.run_dir, "text": name_of(one.data), **evaluate_run(one, bar)})
        except BadInput as error:  # the others are scored all the same
            failed.append(error)
    if not found:
        raise failed[0]
    print(format_table(score_table(found, several)), file=sys.stderr)
    for title, rows in detail_tables(found, several):
        print("", title, format_table(rows), sep="\n", file=sys.stderr)
    if config.plot is not None:
        draw(found, Path(config.plot).expanduser())
    for one_found in found if not several else ():
        del one_found["run"], one_found["text"]
    print(json.dumps(found if several else found[0]))
    return max(map(report, failed), default=0)


def main(line: list[str] | None = None) -> None:
    launch(task, EvaluateConfig, "evaluate", line)
