"""What init_from names, a finished model that a run starts from, as far as it can be known without its weights."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.config import TokenizerConfig, UserError
from lm.config.checks import reading
from lm.exchange.find_model import ModelSettings, model_folder, read_settings
from lm.system.files import read_json, sha256

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
FREE = ("dropout", "lora_rank", "lora_alpha", "lora_targets")  # settings that a model's weights do not depend on


@dataclass(slots=True, kw_only=True)
class Base:
    """A finished model, with what is known of its training."""

    folder: Path  # of the model
    settings: ModelSettings
    sha256: str  # of the weights; they are compared with it when they are read
    tokenizer: TokenizerConfig  # its tokenizer.json
    typed: dict[str, Any]  # the settings of the group `tokenizer` that would describe it
    steps: int | None  # of training, with those of the runs that it started from itself; None: unknown
    tokens: int | None

    def record(self, path: str) -> dict[str, Any]:
        """For result.json: where the weights came from."""
        head = self.settings.head.name
        return {"path": path, "sha256": self.sha256, "head": head, "steps": self.steps, "tokens": self.tokens}


def agrees(key: str, value: Any, loaded: Any) -> bool:
    """Whether a run whose setting model.KEY is `value` can start from a model where it is `loaded`."""
    return key in FREE or value == loaded or (key, value, loaded) == ("linear", "lora", "linear")


def read_base(init_from: str) -> Base:
    """Raises UserError naming what is missing or damaged. It imports nothing heavy."""
    folder = model_folder(init_from, "init_from")
    settings, path = read_settings(folder), folder / TOKENIZER
    if settings.architecture is not None:
        from lm.exchange.pretrained import weights_hash

        weights = weights_hash(folder)
    elif sha256(path) == settings.sha256[TOKENIZER]:
        weights = settings.sha256[WEIGHTS]
    else:
        raise UserError(f"{path}: damaged, its bytes do not match config.json")
    steps, tokens = training_of(folder)
    return Base(
        folder=folder,
        settings=settings,
        sha256=weights,
        tokenizer=TokenizerConfig(kind="file", vocab_size=None, path=str(path)),
        typed=kind_of(path, settings.vocab_size),
        steps=steps,
        tokens=tokens,
    )


def kind_of(path: Path, vocab_size: int) -> dict[str, Any]:
    """The settings with which a tokenizer of this project was made; those of another are its file's alone."""
    with suppress(UserError), reading(path):  # load_tokenizer says what is wrong with the file
        model = read_json(path)["model"]
        if model["type"] == "BPE" and model.get("merges"):
            return {"kind": "bpe", "vocab_size": vocab_size}
        if kind := {"WordLevel": "char", "BPE": "byte"}.get(model["type"]):
            return {"kind": kind, "vocab_size": None}
    return {}


def training_of(folder: Path) -> tuple[int | None, int | None]:
    """Steps and tokens of the training of the model in a run directory's `folder`."""
    path = folder.parent / "result.json"
    if folder.name != "model" or not path.exists():
        return None, None
    with reading(path):
        result = read_json(path)
        before = result["init_from"] or {"steps": 0, "tokens": 0}
        return result["steps"] + before["steps"], result["tokens"] + before["tokens"]
