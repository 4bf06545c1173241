"""What is known of a model folder without its weights: where it is, what builds the model, how it was trained.

A folder is that of a run, or one that transformers has written. Nothing here imports torch, but for the latter.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.config import TokenizerConfig, UserError
from lm.config.checks import build, reading
from lm.config.model import TOKENIZER, WEIGHTS, ModelSettings
from lm.system.files import read_json, sha256

INDEX = "model.safetensors.index.json"  # of a folder of transformers in several files
FREE = ("dropout", "lora_rank", "lora_alpha", "lora_targets")  # settings that a model's weights do not depend on


def model_folder(run_dir: str | Path, key: str = "run_dir") -> Path:
    """The model folder of a run directory; `run_dir` may also be the model folder, or a folder of transformers.

    Raises UserError if there is none, and OSError if it cannot be read.
    """
    folder = Path(os.path.expanduser(run_dir))
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise UserError(f"{key}={run_dir}: {what}; expected a run directory that train wrote")
    if (folder / "model").is_dir():
        folder = folder / "model"
    try:
        os.stat(folder / "config.json")  # raises PermissionError in a closed folder, which need not be empty
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{key}={run_dir}: holds no model; expected a run directory that train has finished") from None
    for name in (TOKENIZER, INDEX if (folder / INDEX).exists() else WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: no such file; expected what train wrote, or a folder of transformers")
    return folder


def read_settings(folder: Path) -> ModelSettings:
    """The settings of the model in its folder. Raises UserError naming the file, and the key that is wrong."""
    path = folder / "config.json"
    with reading(path):
        content = read_json(path)
        if "model_type" not in content:
            settings: ModelSettings = build(ModelSettings, content)
            if {*settings.sha256} != {WEIGHTS, TOKENIZER} or settings.architecture is not None:
                raise UserError(f"sha256: expected those of {WEIGHTS} and {TOKENIZER}")
            return settings
    from lm.formats.pretrained import pretrained_settings

    return pretrained_settings(folder, content["model_type"])


@dataclass(slots=True, kw_only=True)
class Base:
    """A finished model that a run starts from, with what is known of its training."""

    folder: Path  # of the model
    settings: ModelSettings
    sha256: str  # of the weights; they are compared with it when they are read
    tokenizer: TokenizerConfig  # its tokenizer.json
    typed: dict[str, Any]  # the settings of the group `tokenizer` that would describe it
    steps: int | None  # of training, with those of the runs that it started from itself; None: unknown
    tokens: int | None


def agrees(key: str, value: Any, loaded: Any) -> bool:
    """Whether a run whose setting model.KEY is `value` can start from a model where it is `loaded`."""
    return key in FREE or value == loaded or (key, value, loaded) == ("linear", "lora", "linear")


def read_base(init_from: str) -> Base:
    """What `init_from` names. Raises UserError naming what is missing or damaged."""
    folder = model_folder(init_from, "init_from")
    settings, path = read_settings(folder), folder / TOKENIZER
    if settings.architecture is not None:
        from lm.formats.pretrained import weights_hash

        weights = weights_hash(folder)
    elif sha256(path) == settings.sha256[TOKENIZER]:
        weights = settings.sha256[WEIGHTS]
    else:
        raise UserError(f"{path}: damaged, its bytes do not match config.json")
    steps, tokens = _training_of(folder)
    return Base(
        folder=folder,
        settings=settings,
        sha256=weights,
        tokenizer=TokenizerConfig(kind="file", vocab_size=None, path=str(path)),
        typed=_kind_of(path, settings.vocab_size),
        steps=steps,
        tokens=tokens,
    )


def _kind_of(path: Path, vocab_size: int) -> dict[str, Any]:
    """The settings with which a tokenizer of this project was made; those of another are its file's alone."""
    with suppress(UserError), reading(path):  # load_tokenizer says what is wrong with the file
        model = read_json(path)["model"]
        if model["type"] == "BPE" and model.get("merges"):
            return {"kind": "bpe", "vocab_size": vocab_size}
        if kind := {"WordLevel": "char", "BPE": "byte"}.get(model["type"]):
            return {"kind": kind, "vocab_size": None}
    return {}


def _training_of(folder: Path) -> tuple[int | None, int | None]:
    """Steps and tokens of the training of the model in a run directory's `folder`."""
    path = folder.parent / "result.json"
    if folder.name != "model" or not path.exists():
        return None, None
    with reading(path):
        result = read_json(path)
        before = result["init_from"] or {"steps": 0, "tokens": 0}
        if None in (before["steps"], before["tokens"]):  # it started from weights without a record of their training
            return None, None
        return result["steps"] + before["steps"], result["tokens"] + before["tokens"]
