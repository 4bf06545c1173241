"""A model as a folder: model.safetensors, tokenizer.json and config.json, none of which can run code.

And its adapters: merged into its matrices, and as a folder that PEFT loads onto the exported base model.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from lm.config import UserError, foreign_classes
from lm.config.model import TOKENIZER, WEIGHTS, ModelSettings
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.formats.base import model_folder, read_settings
from lm.model.linear import LoRALinear, is_adapter
from lm.model.transformer import Transformer
from lm.model.user_class import check_classes
from lm.system.files import atomic_file, sha256, write_json, write_text

log = logging.getLogger(__name__)


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a file atomically. `safetensors.torch.save_file` would replace `path` by a file that is not synced yet."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    with atomic_file(path) as file:
        file.write(save(whole, {"format": "pt"}))


def read_weights(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, each in memory of its own and in the precision of `expected`, which may lie on "meta".

    Raises ValueError, before memory is taken, for a tensor that is missing, superfluous or of another shape.
    """
    stored = load_file(path)  # maps the file
    for name in sorted(expected.keys() | stored.keys()):
        shapes = [tuple(weights[name].shape) if name in weights else None for weights in (stored, expected)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{name}: {path.name} has the shape {shapes[0]}, the settings give {shapes[1]}")
    return {name: tensor.to(expected[name].dtype, copy=True) for name, tensor in stored.items()}


def saved_state(net: Transformer) -> dict[str, Tensor]:
    """The weights of a model as they are saved: of a head that is tied for now, they are the embedding's."""
    head = net.head.saved(net.embed.weight)
    return net.state_dict() | {f"head.{name}": tensor for name, tensor in head.items()}


def save_model(net: Transformer, tokenizer: Tokenizer, folder: Path) -> None:
    """Write model.safetensors, tokenizer.json and, last, config.json with their hashes. `net` stays as it is."""
    folder.mkdir(exist_ok=True)
    write_weights(folder / WEIGHTS, saved_state(net))
    write_text(folder / TOKENIZER, tokenizer.to_json())
    settings = ModelSettings(
        vocab_size=net.vocab_size,
        seq_len=net.seq_len,
        document_separator=net.document_separator,
        model=net.config,
        head=net.head_config,
        sha256={name: sha256(folder / name) for name in (WEIGHTS, TOKENIZER)},
    )
    write_json(folder / "config.json", asdict(settings))


def load_model(run_dir: str | Path, classes: Sequence[type | str] = ()) -> tuple[Transformer, Tokenizer]:
    """The model and tokenizer of a run directory (or of its model/ folder), ready to generate, on the CPU.

    `run_dir` may also be a folder of transformers. `classes` are the classes of your own, or their dotted paths, that
    the settings of the model may name. Raises UserError naming the file that is missing or damaged, or a class that is
    not among `classes`.

    >>> load_model("runs/absent")
    Traceback (most recent call last):
    lm.config.checks.UserError: run_dir=runs/absent: no such folder; expected a run directory that train wrote
    """
    folder = model_folder(run_dir)
    settings = read_settings(folder)
    if settings.architecture is not None:
        from lm.formats.pretrained import load_pretrained

        return load_pretrained(folder, settings)
    check_classes(settings.model, classes)
    for name, right in settings.sha256.items():
        if sha256(folder / name) != right:
            raise UserError(f"{folder / name}: damaged, its bytes do not match config.json")
    tokenizer = load_tokenizer(folder / TOKENIZER)
    try:
        return _read_net(folder / WEIGHTS, settings).eval(), tokenizer
    except (ValueError, TypeError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{folder / 'config.json'}: {reason}; expected what train wrote") from error


def _read_net(path: Path, settings: ModelSettings) -> Transformer:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # whatever a notebook has set
    try:
        # a class of the user's own may have tensors that no file holds
        with torch.device("cpu" if foreign_classes(settings.model) else "meta"):
            net = Transformer(
                settings.model,
                settings.head,
                vocab_size=settings.vocab_size,
                seq_len=settings.seq_len,
                document_separator=settings.document_separator,
            )
    finally:
        torch.set_default_dtype(default)
    net.load_state_dict(read_weights(path, net.state_dict()), assign=True)
    return net


# --- adapters


@torch.no_grad()
def merged(net: Transformer) -> Transformer:
    """A model of plain projections that computes the same; one without adapters is returned itself.

    What has no adapter is shared with `net`, not copied.
    """
    if not net.config.adapted:
        return net
    weights = {name: tensor for name, tensor in net.state_dict().items() if not is_adapter(name)}
    for name, module in net.named_modules():
        if isinstance(module, LoRALinear):
            weights[f"{name}.weight"] = module.merged()
    config = replace(net.config, linear="linear", lora_rank=None, lora_alpha=None, lora_targets=None)
    with torch.device("meta"):
        plain = Transformer(config, net.head_config, vocab_size=net.vocab_size, seq_len=net.seq_len)
    plain.load_state_dict(weights, assign=True)
    plain.document_separator = net.document_separator
    return plain


def save_adapter(net: Transformer, base: str | None, folder: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors of a model with adapters; nothing of one without.

    `base` names the model that the adapters are for. The matrices of an architecture that are not ours one by one, as
    those of GPT-2, have no adapters of the same form: then the log says so, and nothing is written.
    """
    if not net.config.adapted:
        return
    from lm.formats.architectures import architecture_of

    adapters = {name: tensor for name, tensor in net.state_dict().items() if is_adapter(name)}
    try:
        architecture = architecture_of(net.config)
        if architecture.is_gpt2:
            raise UserError(f"{architecture.name} stores q, k and v as one matrix")
    except UserError as error:
        log.info("%s is not written, PEFT could not use it: %s; model/ holds the merged model", folder, error)
        return
    names = architecture.names(adapters)
    tensors = {f"base_model.model.{name}": adapters[own_name] for name, (own_name,) in names.items()}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": net.config.rank,
        "lora_alpha": net.config.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder.mkdir(exist_ok=True)
    write_weights(folder / "adapter_model.safetensors", tensors)
    write_text(folder / "adapter_config.json", json.dumps(settings, indent=2) + "\n")
