"""The validation text that a finished run was scored on."""

import os
from dataclasses import replace
from pathlib import Path

from lm.config import DataConfig, TokenizerConfig, UserError
from lm.config.checks import build, reading
from lm.data.paths import from_above
from lm.data.tokens import TextData, prepare
from lm.system.files import read_yaml

OwnText = tuple[DataConfig, TokenizerConfig, tuple[str, str]]  # with the hashes of text and tokenizer


def own_text(run_dir: Path, trust: bool) -> OwnText:
    """What a run's config.yaml says of its text, of which nothing is read.

    Without `trust`, refuses an address that the run's files name. Raises UserError.
    """
    try:
        with reading(run_dir / "config.yaml"):
            settings = read_yaml(run_dir / "config.yaml")
            hashes = settings["data_hash"], settings["tokenizer_hash"]
            config: DataConfig = build(DataConfig, settings["data"])
            if revision := settings.get("data_revision"):
                config = replace(config, revision=revision)  # the branch may have moved on
            tokenizer: TokenizerConfig = build(TokenizerConfig, settings["tokenizer"])
    except OSError as error:
        hint = "expected a finished run, or a text: data=text data.path=FILE"
        raise UserError(f"{error.filename}: {error.strerror}; {hint}") from error
    if tokenizer.kind == "file":  # the run has a copy; the file that it was made with may be gone
        tokenizer = replace(tokenizer, path=str(run_dir / "model/tokenizer.json"))
    for place in (config.path or "", config.val_path or ""):
        if not trust and (config.source == "hub" or "://" in place):
            raise UserError(f"run_dir={run_dir}: its text comes from {place}; trust=true downloads it")
    if config.source != "hub":
        config.path, config.val_path = (from_above(run_dir, path) for path in (config.path, config.val_path))
    if not os.access(Path(os.path.expanduser(config.cache_dir), "tokens"), os.R_OK):  # the run was made elsewhere
        config = replace(config, cache_dir=DataConfig().cache_dir)
    return config, tokenizer, hashes


def own_data(run_dir: Path, trust: bool, bar: bool = False) -> tuple[TextData, DataConfig]:
    """A run's text; without `trust`, none from an address that the run's files name. Raises UserError."""
    config, tokenizer, hashes = own_text(run_dir, trust)
    trained = run_dir / "model/tokenizer.json"
    data = prepare(config, tokenizer, not bar, trained)
    if (data.hash, data.tokenizer.hash) != hashes:
        changed = "its text has" if data.hash != hashes[0] else "its tokenizer has"
        raise UserError(f"run_dir={run_dir}: {changed} changed since training; give a text: data=text data.path=FILE")
    return data, config
