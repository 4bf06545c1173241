"""Score a model: lm-lab evaluate [RUN] [FILE] [data=text data.path=FILE]

Without a text, the command scores the validation text of the run; with a text, all of this text. Windows are
as long as the model's context. run_dir=[RUN1,RUN2] or a glob scores several runs, texts=[FILE1,FILE2] or a
glob several texts. details=true adds the loss by target and by the frequency of the target. document_mask=true
scores each document without the documents before it; the default is as in training. The table goes to standard
error, the same numbers as JSON to standard output.
"""

import glob
import json
import logging
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lm.cli.arguments import (
    classify,
    for_hydra,
    is_folder,
    is_text,
    key_of,
    kinds_of,
    parse,
    text_settings,
    unknown_word,
    with_folders,
)
from lm.cli.compose import compose
from lm.cli.main import report_error
from lm.config import SOURCE_SETTINGS, DataConfig, RunConfig
from lm.data.paths import is_url, kind_of, listed, local_files
from lm.errors import UserError, check_settings, error_prefix, expand_paths, require, without_secrets
from lm.folder import load_model, model_folder, read_settings, run_of, runs_of
from lm.registry import from_lab
from lm.system.terminal import format_table

# Settings of data that say which text is read. All other settings of data are for training.
TEXT_SETTINGS = {"source", "path", "cache_dir", *SOURCE_SETTINGS} - {"val_path", "val_split"}
HIDDEN = {f"data.{item.name}" for item in fields(DataConfig) if item.name not in TEXT_SETTINGS}  # no keys of evaluate
Rows = list[tuple[str, ...]]
log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class EvaluateConfig:
    run_dir: str | None = None  # run, [RUN1,RUN2] or glob; null: newest run
    data: DataConfig | None = None  # text, chosen by the group data; null: validation text of the run
    texts: str | None = None  # paths of several texts, [FILE1,FILE2] or a glob, in place of data
    seq_len: int | None = None  # tokens of a window; null: the model's context
    document_mask: bool | None = None  # whether attention stays in a document; null: as in training
    details: bool = False  # whether the loss by the target, and by the frequency of the target, is shown
    threads: int | None = None  # threads of torch; null: OMP_NUM_THREADS, else all cores
    classes: list[str] | None = None  # dotted paths of classes of your own that a model may use

    def __post_init__(self) -> None:
        expand_paths(self, "run_dir", "texts")
        require(self.data is None or self.texts is None, f"texts={self.texts}", "data or texts, not both")
        check_settings("", self, "threads", "seq_len")


SCHEMA = EvaluateConfig


def run(args: list[str]) -> int:
    return score(parse_arguments(args))


def parse_arguments(args: list[str]) -> EvaluateConfig:
    """Return the configuration. A bare folder is a run, or a text beside a run; a bare file is the text.

    Raises UserError.
    """
    kinds = {key: kind for key, kind in kinds_of(EvaluateConfig).items() if key not in HIDDEN}
    _, settings, words = classify(args, kinds, {})
    folders = [word for word in words if is_folder(word)]
    is_named = any(key_of(word) == "run_dir" for word in settings)
    marks = ("config.yaml", "config.json", "model")
    runs = [word for word in folders if glob.has_magic(word) or any(Path(word, mark).exists() for mark in marks)]
    runs = runs or folders[: not is_named]  # an error will say that the first folder holds no model
    texts = [word for word in words if word not in runs]
    for word in texts:
        if not is_text(word):
            raise UserError(unknown_word(word))
    if len(texts) > 1:
        several = shlex.quote(f"texts=[{','.join(texts)}]")
        raise UserError(f"{texts[1]}: is a second text; did you mean {several}?")
    data = [word for word in settings if word.lstrip("+").startswith(("data=", "data."))]
    settings = with_folders(runs, [word for word in settings if word not in data])
    if texts:
        data = [*text_settings(texts[0]), *data]
    if data and any(key_of(word) == "texts" for word in settings):
        raise UserError(f"{data[0]}: is for one text, given as data=text data.path=FILE, and not for texts=")
    if data and not any(word.startswith("data=") for word in data):
        raise UserError(f"{data[0]}: choose a kind of text beside it, as in data=text data.path=FILE")
    text = compose("train", [for_hydra(word, kinds_of(RunConfig)) for word in data], RunConfig).data if data else None
    config: EvaluateConfig = parse(EvaluateConfig, settings, data=text)
    return config


def score(config: EvaluateConfig) -> int:
    """Score each run on each text. Load each model once, and read each text once for each tokenizer."""
    runs = runs_of(config.run_dir)  # raises UserError before the slow imports below
    texts = _texts_of(config)
    for name in runs:
        read_settings(model_folder(name))
    from lm.system.device import best_device, set_threads
    from lm.training.run_directory import RunDirectory

    for name in runs if None in texts else ():
        RunDirectory(run_of(name)).data_config()  # raises UserError before another run is scored

    set_threads(config.threads)
    is_several = config.texts is not None or config.run_dir not in (None, runs[0])
    scores, failed = list[dict[str, Any]](), list[UserError]()
    encoded: dict[tuple[str, str], Any] = {}  # (text, hash of the tokenizer) -> tokens
    for name in tqdm(runs, "runs", leave=False, disable=not sys.stderr.isatty() or len(runs) == 1):
        try:
            with error_prefix(f"run_dir={name}"):
                net, tokenizer = load_model(name, config.classes or ())
                net.to(best_device())
        except UserError as error:  # the other runs are scored all the same
            failed.append(error)
            continue
        for text in texts:
            label = "validation text" if text is None else without_secrets(text.path or text.source)
            try:
                with error_prefix(f"run_dir={name}" if text is None else f"run_dir={name}, {label}"):
                    values = score_text(net, tokenizer, Path(name), text, config, encoded)
                scores.append({"run": name, "text": label, **values})
            except UserError as error:
                failed.append(error)
    if not scores:
        raise failed[0]
    print(format_table(score_table(scores, is_several)), file=sys.stderr)
    for title, records in from_lab("lm.lab.measures.details.tables")(scores, is_several) if config.details else ():
        print("", title, format_table(_rows(records)), sep="\n", file=sys.stderr)
    single = {key: value for key, value in scores[0].items() if key not in ("run", "text")}
    print(json.dumps(scores if is_several else single))
    return max(map(report_error, failed), default=0)


def _texts_of(config: EvaluateConfig) -> list[DataConfig | None]:
    if config.data is not None:
        return [config.data]
    if config.texts is None:
        return [None]
    texts: list[DataConfig | None] = []
    for path in listed(config.texts, "texts"):
        if not is_url(path):
            local_files(path, key="texts")
        texts.append(DataConfig(source=kind_of(path), path=path))
    return texts


def score_text(
    net: Any,
    tokenizer: Any,
    run_dir: Path,
    text: DataConfig | None,
    config: EvaluateConfig,
    encoded: dict[tuple[str, str], Any],
) -> dict[str, Any]:
    """Return the scores of a model on a text, or on the validation text of its run. Raises UserError."""
    from lm.data.tokens import encode_whole
    from lm.scoring import evaluate
    from lm.training.run_directory import RunDirectory

    if (config.seq_len or 1) > net.seq_len:
        raise UserError(f"seq_len={config.seq_len}: the context of the model is {net.seq_len}")
    if config.document_mask is not None:
        net.document_separator = tokenizer.eot if config.document_mask else None
    bar = sys.stderr.isatty()
    run_dir = run_of(run_dir)
    if text is None:
        data = RunDirectory(run_dir).read_text()
        tokens, n_bytes, train = data.val, data.val_bytes, data.train
    else:
        key = (repr(text), tokenizer.hash)
        if key not in encoded:
            encoded[key] = encode_whole(text, tokenizer)
        (tokens, n_bytes, text_hash), train = encoded[key], None
        what_was_read = from_lab("lm.lab.measures.leakage.what_was_read", default=lambda *_: "")
        if reason := what_was_read(run_dir, tokens, text, text_hash):
            place = without_secrets(text.path or text.source)
            log.warning("%s: the score may be too good, because run_dir=%s %s", place, run_dir, reason)
    measures = [from_lab("lm.lab.measures.details.Details")(net.vocab_size, tokenizer.label)] if config.details else []
    window = config.seq_len or net.seq_len
    scores = evaluate(net, tokens, window, bar=bar, measures=measures, unscored=tokenizer.unscored)
    if not math.isfinite(scores.loss):
        raise UserError(f"the loss is {scores.loss}; the weights are damaged, or the training diverged")
    result: dict[str, Any] = {
        "loss": scores.loss,
        "perplexity": scores.perplexity,
        "bpb": scores.bpb(n_bytes),
        "top1": scores.top1,
        "tokens": scores.n_tokens,
        "bytes": n_bytes,
    }
    for measure in measures:
        result |= measure.scores(train)
    return result


def score_table(scores: list[dict[str, Any]], is_several: bool) -> Rows:
    """Return a row for each figure, or a row for each pair of run and text if `is_several`."""
    plain = [
        {key: value for key, value in score.items() if not isinstance(value, list) and key != "frequency_in"}
        for score in scores
    ]
    if is_several:
        return _rows(plain)
    return [(key, _cell(value)) for key, value in plain[0].items() if key not in ("run", "text")]


def _rows(records: Sequence[Mapping[str, Any]]) -> Rows:
    return [tuple(records[0]), *(tuple(map(_cell, record.values())) for record in records)]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}"
    return "beyond e^700" if value is None else str(value)
