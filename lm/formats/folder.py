"""A model as a folder: model.safetensors, tokenizer.json and config.json, none of which can run code."""

from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from lm.config import UserError, foreign_classes
from lm.config.checks import error_prefix
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.formats.base import model_folder, read_settings
from lm.formats.chat import read_chat, save_chat
from lm.formats.pretrained import load_pretrained
from lm.formats.settings import TOKENIZER, WEIGHTS, ModelSettings
from lm.formats.weights import read_weights, write_weights
from lm.model.transformer import Transformer
from lm.model.user_class import import_class
from lm.system.files import sha256, write_json, write_text


def saved_state(net: Transformer) -> dict[str, Tensor]:
    """The weights of a model as they are saved: of a head that is tied for now, they are the embedding's."""
    head = net.head.saved(net.embed.weight)
    return net.state_dict() | {f"head.{name}": tensor for name, tensor in head.items()}


def save_model(net: Transformer, tokenizer: Tokenizer, folder: Path) -> None:
    """Write model.safetensors, tokenizer.json and, last, config.json with their hashes. `net` stays as it is."""
    folder.mkdir(exist_ok=True)
    write_weights(folder / WEIGHTS, saved_state(net))
    write_text(folder / TOKENIZER, tokenizer.to_json())
    save_chat(tokenizer.chat, folder)
    settings = ModelSettings(
        vocab_size=net.vocab_size,
        seq_len=net.seq_len,
        document_separator=net.document_separator,
        model=net.config,
        head=net.head_config,
        sha256={name: sha256(folder / name) for name in (WEIGHTS, TOKENIZER)},
    )
    write_json(folder / "config.json", asdict(settings))


def load_model(run_dir: str | Path, trust: bool = False) -> tuple[Transformer, Tokenizer]:
    """The model and tokenizer of a run directory (or of its model/ folder), ready to generate, on the CPU.

    `run_dir` may also be a folder of transformers. `trust` allows importing the classes of the user's own that the
    run's settings name. Raises UserError naming the file that is missing or damaged.

    >>> load_model("runs/absent")
    Traceback (most recent call last):
    lm.config.checks.UserError: run_dir=runs/absent: no such folder; expected a run directory that train wrote
    """
    folder = model_folder(run_dir)
    settings = read_settings(folder)
    if settings.architecture is not None:
        return load_pretrained(folder, settings)
    for key, path in foreign_classes(settings.model).items():
        import_class(key, path, trust)
    for name, right in settings.sha256.items():
        if sha256(folder / name) != right:
            raise UserError(f"{folder / name}: damaged, its bytes do not match config.json")
    tokenizer = load_tokenizer(folder / TOKENIZER)
    read_chat(folder, tokenizer)
    with error_prefix(str(folder / "config.json")):
        try:
            net = _read_net(folder / WEIGHTS, settings)
        except (ValueError, TypeError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{str(error).splitlines()[0]}; expected what train wrote") from error
        if max(tokenizer.vocab_size, net.config.vocab_rows or 0) != net.vocab_size:
            raise UserError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {net.vocab_size}")
        if net.document_separator not in (None, tokenizer.eot):
            expected = f"{tokenizer.eot}, the tokenizer's end-of-text token, or null"
            raise UserError(f"document_separator={net.document_separator}, expected {expected}")
    return net.eval(), tokenizer


def _read_net(path: Path, settings: ModelSettings) -> Transformer:
    # a class of the user's own may have tensors that no file holds
    with torch.device("cpu" if foreign_classes(settings.model) else "meta"):
        net = Transformer(
            settings.model,
            settings.head,
            vocab_size=settings.vocab_size,
            seq_len=settings.seq_len,
            document_separator=settings.document_separator,
        )
    net.load_state_dict(read_weights(path, net.state_dict()), assign=True)
    return net
