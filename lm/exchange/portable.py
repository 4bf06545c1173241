"""A model as a folder: model.safetensors, tokenizer.json and config.json, none of which can run code."""

from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from lm.config import BadInput, foreign_classes
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.exchange.find_model import FILES, ModelSettings, model_folder, read_settings
from lm.exchange.pretrained import load_pretrained
from lm.exchange.weights import write_weights
from lm.model.transformer import Transformer
from lm.model.user_class import import_class
from lm.system.files import sha256, write_json, write_text


def save_model(net: Transformer, tokenizer: Tokenizer, folder: Path) -> None:
    """Write model.safetensors, tokenizer.json and, last, config.json, which holds their hashes."""
    folder.mkdir(exist_ok=True)
    net.head.before_save(net.embed.weight)
    write_weights(folder / "model.safetensors", net.state_dict())
    write_text(folder / "tokenizer.json", tokenizer.to_json())
    settings = ModelSettings(
        vocab_size=net.vocab_size,
        seq_len=net.seq_len,
        document_separator=net.document_separator,
        model=net.config,
        head=net.head_config,
        sha256={name: sha256(folder / name) for name in FILES},
    )
    write_json(folder / "config.json", asdict(settings))


def load_model(run_dir: str | Path, trust: bool = False) -> tuple[Transformer, Tokenizer]:
    """The model and tokenizer of a run directory (or of its model/ folder), ready to generate, on the CPU.

    `trust` allows importing the classes of the user's own that the run's settings name. Raises BadInput naming the file
    that is missing or damaged.

    >>> load_model("runs/absent")
    Traceback (most recent call last):
    lm.config.checks.BadInput: run_dir=runs/absent: no such folder; expected a run directory that train wrote
    """
    folder = model_folder(run_dir)
    settings, weights = read_settings(folder), folder / "model.safetensors"
    if settings.architecture is not None:
        return load_pretrained(folder, settings)
    for key, path in foreign_classes(settings.model).items():
        import_class(key, path, trust)
    for name in FILES:
        if sha256(folder / name) != settings.sha256[name]:
            raise BadInput(f"{folder / name}: damaged, its bytes do not match config.json")
    try:
        check_shapes(settings, weights)
        net = construct(settings)
        net.load_state_dict(load_file(weights))
    except (ValueError, TypeError, RuntimeError, SafetensorError, FileNotFoundError) as error:
        raise BadInput(f"{folder / 'config.json'}: {str(error).splitlines()[0]}; expected what train wrote") from error
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    if max(tokenizer.vocab_size, net.config.vocab_rows or 0) != net.vocab_size:
        raise BadInput(f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model {net.vocab_size}")
    if net.document_separator not in (None, tokenizer.eot):
        found = f"document_separator={net.document_separator}"
        raise BadInput(
            f"{folder / 'config.json'}: {found}, expected {tokenizer.eot}, the tokenizer's end-of-text token, or null"
        )
    return net.eval(), tokenizer


def construct(settings: ModelSettings) -> Transformer:
    return Transformer(
        settings.model,
        settings.head,
        vocab_size=settings.vocab_size,
        seq_len=settings.seq_len,
        document_separator=settings.document_separator,
    )


def check_shapes(settings: ModelSettings, weights: Path) -> None:
    """Raise ValueError if the file does not hold the tensors of this model, before memory is taken for any."""
    with safe_open(weights, "pt") as file:
        names = file.keys()
        found = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    if settings.model.n_layers > len(found):
        raise ValueError(f"model.n_layers={settings.model.n_layers}: {weights.name} has {len(found)} tensors")
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in construct(settings).state_dict().items()}
    for name in sorted(expected.keys() | found.keys()):
        if (here := expected.get(name)) != (there := found.get(name)):
            raise ValueError(f"{name}: {weights.name} has the shape {there}, the settings give {here}")
