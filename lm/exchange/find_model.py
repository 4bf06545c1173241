"""The folder of a run directory that holds its model, and what it says of the model beside the weights.

A folder that transformers has written does as well; lm/exchange/pretrained.py reads it.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.config import HeadConfig, ModelConfig, UserError, require_min
from lm.config.checks import reading
from lm.config.typed import build
from lm.system.files import read_json

FILES = ("model.safetensors", "tokenizer.json")
INDEX = "model.safetensors.index.json"  # of a Hugging Face folder in several files


@dataclass(slots=True, kw_only=True)
class ModelSettings:
    """The content of config.json: all that builds a model, and the hashes of the files beside it."""

    vocab_size: int
    seq_len: int  # the longest context
    document_separator: int | None = None
    model: ModelConfig
    head: HeadConfig
    sha256: dict[str, str]  # of FILES; empty for a Hugging Face folder, which says none
    architecture: str | None = None  # in transformers, of a Hugging Face folder

    def __post_init__(self) -> None:
        require_min(1, "", self, "vocab_size", "seq_len")
        require_min(0, "", self, "document_separator")
        if self.architecture is None and set(self.sha256) != set(FILES):
            raise UserError(f"sha256: names {', '.join(self.sha256) or 'nothing'}; expected {' and '.join(FILES)}")


def model_folder(run_dir: str | Path, key: str = "run_dir") -> Path:
    """The model folder of a run directory; `run_dir` may also be the model folder, or a Hugging Face folder.

    Raises UserError if there is none, and OSError if it cannot be read.
    """
    folder = Path(run_dir).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise UserError(f"{key}={run_dir}: {what}; expected a run directory that train wrote")
    if (folder / "model").is_dir():
        folder = folder / "model"
    try:
        os.stat(folder / "config.json")  # raises PermissionError in a closed folder, which need not be empty
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{key}={run_dir}: holds no model; expected a run directory that train has finished") from None
    index = [INDEX] if (folder / INDEX).exists() else []
    for name in ("config.json", "tokenizer.json", *(index or ["model.safetensors"])):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: no such file; expected what train wrote, or a folder of transformers")
    return folder


def read_settings(folder: Path) -> ModelSettings:
    """The settings of the model in its folder. Raises UserError naming the file, and the key that is wrong."""
    path = folder / "config.json"
    with reading(path):
        found = read_json(path)
        if "model_type" not in found:
            return own_settings(found)
    from lm.exchange.pretrained import pretrained_settings

    return pretrained_settings(folder, found)


def own_settings(found: dict[str, Any]) -> ModelSettings:
    if found.get("architecture") is not None:
        raise UserError(f"architecture={found['architecture']}: is not a setting of a model of this project")
    settings: ModelSettings = build(ModelSettings, found)
    return settings
