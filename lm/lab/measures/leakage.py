"""Whether a model was trained on the text that scores the model: such a score is too good."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lm.config import DataConfig, RunConfig
from lm.data.paths import as_started, is_url, local_files
from lm.data.sources import local_states
from lm.data.text import MIN_COPIED
from lm.data.tokens import TextData, copied_share
from lm.errors import UserError, reading
from lm.folder import WEIGHTS, find_model, read_settings, run_of
from lm.training.run_directory import RunDirectory

LARGE = 100_000_000  # bytes of a training text


def texts_read(run_dir: Path) -> list[list[Any]]:
    """Return the training text of a run and of each run before it: val_fraction, hash and digest of the source.

    The hash is of the text, and of the split if val_fraction alone does not decide the split. Without a run there
    is no text.
    """
    directory = RunDirectory(run_dir)
    if not (saved := directory.read_config()):
        return []
    with reading(directory.config):
        before = (saved.get("init_record") or {}).get("texts", [])
        return [*before, [saved["data"]["val_fraction"], saved["data_hash"], saved["states"].get("data.path")]]


def has_read(run_dir: Path, text: DataConfig, text_hash: str, share: float = 1.0) -> bool:
    """Return whether a run, or a run before it, was trained on a part of a text that scores a model.

    `share` is the share of the text that scores. A run with a text of the same content has not read this share if
    the hash of its split is the same, and if the run held out no less. If no text has the same content, the files
    of the run itself are compared.
    """
    texts = texts_read(run_dir)
    if not texts or text.column != (own_text := RunDirectory(run_dir).data_config()).column:
        return False
    state = local_states(text).get("data.path", "")
    same = [(fraction, own) for fraction, own, digest in texts if digest == state or own == text_hash]
    if same:
        return any(text_hash != split_hash or share > fraction for fraction, split_hash in same)
    return bool(_local_files(text) & _local_files(own_text))


def what_was_read(run_dir: Path, tokens: np.ndarray, text: DataConfig, text_hash: str, share: float = 1.0) -> str:
    """Return what a run has read of a text that scores a model, with tokens (n,); empty if the run has read nothing.

    Stretches of the text are searched in the training text of the run and of each run before it, unless that run or
    its training text is gone, or the text so large that its encoding might take minutes. `share` is as in `has_read`.
    """
    if has_read(run_dir, text, text_hash, share):
        return "may have been trained on a part of this text"
    directory = RunDirectory(run_dir)
    saved = directory.read_config()
    with suppress(UserError, OSError), _quiet():
        if sum(file.stat().st_size for file in _local_files(directory.data_config())) <= LARGE:
            copied = copied_share(directory.read_text().train, tokens)
            if copied >= MIN_COPIED:
                return f"was trained on a text that holds {copied:.0%} of this text"
    if start := saved.get("init_record"):
        base = as_started(run_dir, saved["started_in"], saved["init_from"])
        with suppress(UserError, OSError):
            if read_settings(find_model(base)[0]).sha256[WEIGHTS] == start["sha256"]:  # else another run lies there now
                return what_was_read(run_of(base), tokens, text, text_hash, share)
    return ""


def scored_text(run: RunConfig, data: TextData) -> tuple[DataConfig, str, float]:
    """Return the settings and the hash of the text that scores a run, and which share of this text scores the run."""
    own = run.data
    if own.val_path is not None:
        return replace(own, path=own.val_path, val_path=None), data.val_hash or "", 1.0
    return own, data.hash, own.val_fraction


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide messages about the training text of the run: a reader would take them for messages about the scored text."""
    logger = logging.getLogger("lm.data")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _local_files(config: DataConfig) -> set[Path]:
    """Return the files of this machine that a text has, under one name each; none where it is gone."""
    if not config.path or config.source == "hub" or is_url(config.path):
        return set()
    with suppress(OSError, UserError):
        return {file.resolve() for file in local_files(config.path).values()}
    return set()
