"""The validation text that a finished run was scored on."""

import os
from dataclasses import replace
from pathlib import Path

from lm.config import DataConfig, TokenizerConfig, UserError
from lm.config.checks import build, reading
from lm.data.paths import downloaded, from_above, is_url
from lm.data.sources import COMMIT
from lm.data.tokens import TextData, prepare
from lm.system.files import read_yaml

GIVE = "give a text: data=text data.path="
OwnText = tuple[DataConfig, TokenizerConfig, tuple[str, str]]  # with the hashes of text and tokenizer


def own_text(run_dir: Path) -> OwnText:
    """Return what a run's config.yaml says of its text, of which nothing is read. Raises UserError."""
    try:
        with reading(run_dir / "config.yaml"):
            settings = read_yaml(run_dir / "config.yaml")
            hashes = settings["data_hash"], settings["tokenizer_hash"]
            config: DataConfig = build(DataConfig, settings["data"])
            if revision := settings.get("data_revision"):
                config = replace(config, revision=revision)  # the branch may have moved on
            tokenizer: TokenizerConfig = build(TokenizerConfig, settings["tokenizer"])
    except OSError as error:
        hint = f"expected a finished run, or {GIVE}FILE"
        raise UserError(f"{error.filename}: {error.strerror}; {hint}") from error
    if tokenizer.kind == "file":  # the run has a copy; the file that it was made with may be gone
        tokenizer = replace(tokenizer, path=str(run_dir / "model/tokenizer.json"))
    if config.source == "hub" and not COMMIT.fullmatch(str(config.revision)):
        raise UserError(f"run_dir={run_dir}: its text comes from {config.path}, of no commit; {GIVE}FILE")
    if config.source != "hub":
        config.path, config.val_path = (from_above(run_dir, path) for path in (config.path, config.val_path))
    if not os.access(Path(os.path.expanduser(config.cache_dir), "tokens"), os.R_OK):  # the run was made elsewhere
        config = replace(config, cache_dir=DataConfig().cache_dir)
    for key, place in (("data.path", config.path), ("data.val_path", config.val_path)):
        if config.source != "hub" and place is not None and is_url(place):  # the word of a folder downloads nothing
            downloaded(place, config.cache, key, downloads=False)
    return config, tokenizer, hashes


def own_data(run_dir: Path, bar: bool = False) -> tuple[TextData, DataConfig]:
    """Return a run's text, which is not downloaded because a run's files name it. Raises UserError."""
    config, tokenizer, hashes = own_text(run_dir)
    trained = run_dir / "model/tokenizer.json"
    data = prepare(config, tokenizer, not bar, trained, downloads=False)
    if (data.hash, data.tokenizer.hash) != hashes:
        changed = "its text has" if data.hash != hashes[0] else "its tokenizer has"
        raise UserError(f"run_dir={run_dir}: {changed} changed since training; {GIVE}FILE")
    return data, config
