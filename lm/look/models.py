"""The models that the page asks: those of runs, or of their newest checkpoints, and their tokens as text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from lm.config import HeadConfig, ModelConfig, UserError, foreign_classes
from lm.config.checks import build, reading
from lm.data.tokenizer import Tokenizer
from lm.formats.folder import load_model
from lm.inference.details import token_counts
from lm.inference.text import own_data
from lm.model.transformer import Transformer
from lm.model.user_class import import_class
from lm.system.device import best_device
from lm.training.run_directory import RunDirectory
from lm.training.state import checkpoints


@dataclass(eq=False)
class LoadedModel:
    name: str
    path: Path  # of the run
    net: Transformer
    tokenizer: Tokenizer
    trust: bool = False  # allows downloading the run's text

    @cached_property
    def own_text(self) -> tuple[np.ndarray, np.ndarray]:
        """The run's validation tokens, and how often each token id occurs in its training text. Raises UserError."""
        data, _ = own_data(self.path, self.trust)
        return data.val, token_counts(data.train, self.net.vocab_size)

    @property
    def counts(self) -> np.ndarray | None:
        """How often each token id occurs in the training text (V,); None if that text is not at hand."""
        try:
            return self.own_text[1]
        except (UserError, OSError):
            return None


def load(name: str, path: Path, trust: bool = False) -> LoadedModel:
    """The model of a run; while it is trained, that of its newest checkpoint. Raises UserError."""
    checkpoint = checkpoint_to_show(path)
    net, tokenizer = load_model(path, trust) if checkpoint is None else _load_checkpoint(path, checkpoint, trust)
    return LoadedModel(name, path, net.to(best_device()), tokenizer, trust)


def checkpoint_to_show(path: Path) -> Path | None:
    """The newest checkpoint of a run without a result, unless its model/ is newer, as after a stop by a signal."""
    newest = next(iter(checkpoints(path / "checkpoints")), None)
    config = path / "model/config.json"
    is_old = newest is not None and config.exists() and newest.stat().st_mtime <= config.stat().st_mtime
    return None if is_old or (path / "result.json").exists() else newest


def _load_checkpoint(path: Path, checkpoint: Path, trust: bool) -> tuple[Transformer, Tokenizer]:
    data, config = own_data(path, trust)
    settings = RunDirectory(path).read_config()
    with reading(checkpoint):
        model: ModelConfig = build(ModelConfig, settings["model"])
        for key, name in foreign_classes(model).items():
            import_class(key, name, trust)
        net = Transformer(
            model,
            build(HeadConfig, settings["head"]),
            vocab_size=data.tokenizer.vocab_size,
            seq_len=config.seq_len,
            document_separator=data.tokenizer.eot if config.document_mask else None,
        )
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        net.load_state_dict(content["average"] or content["net"])  # what is validated
    return net.eval(), data.tokenizer


# --- tokens as text


def token_texts(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Each id with the text that it completes: "" for all but the last token of a character. Joined, it is the text."""
    pending: list[int] = []

    def recorded() -> Iterator[int]:
        for token in ids:
            pending.append(token)
            yield token

    for piece in tokenizer.stream(recorded()):
        *incomplete, last = pending
        pending.clear()
        yield from ((token, "") for token in incomplete)
        yield last, piece
    yield from ((token, "") for token in pending)


def label(tokenizer: Tokenizer, token: int) -> str:
    """A token alone: its text, or its name in the vocabulary."""
    text = tokenizer.decode([token])
    return text if text.strip("\ufffd") else tokenizer.backend.id_to_token(token) or ""


def same_tokenizer(models: Sequence[LoadedModel]) -> bool:
    """Whether token ids mean the same in all of these models."""
    return len({model.tokenizer.hash for model in models}) == 1
