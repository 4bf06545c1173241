"""A model from a Hugging Face folder: config.json, safetensors and tokenizer.json, none of which can run code."""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lm.config import BadInput, HeadConfig, ModelConfig
from lm.data.tokenizer import EOT_NAMES, Tokenizer, load_tokenizer
from lm.exchange.architectures import ACTIVATIONS, ARCHITECTURES, SCALING, Architecture
from lm.exchange.find_model import INDEX, ModelSettings
from lm.model.transformer import Transformer
from lm.system.files import sha256

NEUTRAL: dict[str, object] = {  # keys that change what a model computes, with the value of a model that we have
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "quantization_config": None,
}
NOT_WEIGHTS = re.compile(r".*(rotary_emb\.inv_freq|attn\.(masked_)?bias)")  # constants that some files hold
NAMES = "tokenizer_config.json"  # says which token is which
UNTIED = HeadConfig(name="untied_from_embedding", kind="untied_from_embedding", head_lr_multiplier=1.0)
HEADS = {True: HeadConfig(), False: UNTIED}  # by tie_word_embeddings


def pretrained_settings(folder: Path, settings: dict[str, Any]) -> ModelSettings:
    """What the config.json of a Hugging Face folder says, as our settings. Raises BadInput naming the key."""
    path = folder / "config.json"
    try:
        architecture, model = model_config(settings)
        rows, seq_len = int(settings["vocab_size"]), int(settings[architecture.keys["seq_len"]])
        return ModelSettings(
            vocab_size=rows,
            seq_len=seq_len,
            model=replace(model, vocab_rows=rows),
            head=HEADS[bool(settings["tie_word_embeddings"])],
            sha256={},
            architecture=architecture.name,
        )
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}; expected a folder of transformers") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: {error!r}; expected the config.json of a model of transformers") from error


def load_pretrained(folder: Path, settings: ModelSettings) -> tuple[Transformer, Tokenizer]:
    """The model and the tokenizer of a Hugging Face folder, on the CPU in fp32. Raises BadInput naming key or file."""
    tokenizer = load_tokenizer(folder / "tokenizer.json", eot_name(folder))
    if tokenizer.eot_added:
        usual = ", ".join(EOT_NAMES)
        raise BadInput(f"{folder}: its tokenizer has no end-of-text token; expected eos_token in {NAMES}, or {usual}")
    if tokenizer.vocab_size > settings.vocab_size:
        raise BadInput(f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model {settings.vocab_size}")
    with torch.device("meta"):
        net = Transformer(settings.model, settings.head, vocab_size=tokenizer.vocab_size, seq_len=settings.seq_len)
    fill(net.to_empty(device="cpu"), next(one for one in ARCHITECTURES if one.name == settings.architecture), folder)
    return net.eval(), tokenizer


def eot_name(folder: Path) -> str | None:
    """The end-of-text token that tokenizer_config.json names, if there is such a file and it names one."""
    try:
        found = json.loads((folder / NAMES).read_text()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return found.get("content") if isinstance(found, dict) else found


@cache
def hash_of(path: Path, size: int, changed: int) -> str:
    return sha256(path)


def weights_hash(folder: Path) -> str:
    """Of all safetensors files of the folder, each read once in a process as long as it does not change."""
    paths = [folder / name for name in shards(folder)]
    found = [hash_of(path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def model_config(settings: dict[str, Any]) -> tuple[Architecture, ModelConfig]:
    """The architecture of a config.json, and our settings for it; fills in what transformers takes by default."""
    known = {one.model_type: one for one in ARCHITECTURES}
    if (architecture := known.get(settings.get("model_type", ""))) is None:
        raise BadInput(f"model_type={settings.get('model_type')}: cannot be read; expected one of {', '.join(known)}")
    keys = architecture.keys
    for key, value in architecture.defaults.items():
        settings.setdefault(key, value)
    settings.setdefault("tie_word_embeddings", architecture.model_type == "gpt2")
    d_model, n_heads = settings[keys["d_model"]], settings[keys["n_heads"]]
    rope = {"rope_theta": settings.get("rope_theta", 10000.0), **(settings.get("rope_scaling") or {})}
    rope |= settings.get("rope_parameters") or {}
    for key, neutral in NEUTRAL.items():
        if (found := {**rope, **settings}.get(key, neutral)) != neutral:
            raise BadInput(f"{key}={found}: this project has no model of this kind; expected {neutral}")
    if any(kind != "full_attention" for kind in settings.get("layer_types") or ()):
        raise BadInput("layer_types: only full_attention is supported in every layer")
    activations = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_new": "gelu_tanh"}
    if (ffn := activations.get(settings[keys["ffn"]])) not in architecture.accepts["ffn"]:
        raise BadInput(f"{keys['ffn']}={settings[keys['ffn']]}: is not supported in {architecture.name}")
    ours = {key: settings[name] for key, name in keys.items() if settings.get(name) is not None and key != "seq_len"}
    ours |= {key: values[0] for key, values in architecture.accepts.items()} | {"ffn": ffn}
    if ours["position"] == "rope":
        ours |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling(rope)}
    if architecture.model_type == "gpt2":
        ours |= {"bias": True, "d_ff": settings["n_inner"] or 4 * d_model}
    for key, implied in (("d_head", d_model // n_heads), ("n_kv_heads", n_heads), ("attention_bias", ours["bias"])):
        if ours.get(key) == implied:
            ours[key] = None
    return architecture, ModelConfig(**ours)


def scaling(rope: dict[str, Any]) -> list[float] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise BadInput(f"rope_type={kind}: is not supported; expected default or llama3")
    return None if kind == "default" else [float(rope[key]) for key in SCALING]


@torch.no_grad()
def fill(net: Transformer, architecture: Architecture, folder: Path) -> None:
    """Read every parameter from the safetensors files of a folder, one tensor at a time."""
    ours = dict(net.named_parameters())
    own_head = ours.pop("head.proj.weight", None)
    expected = architecture.names(ours, net.config)
    missing = set(expected) | ({"lm_head.weight"} if own_head is not None else set())
    for name, tensor in tensors(folder):
        name = full_name(name, expected)
        if name == "lm_head.weight":
            if own_head is None and not torch.equal(tensor.float(), net.embed.weight):
                raise BadInput(f"{folder}: lm_head.weight differs from the embedding, but tie_word_embeddings is true")
            parts, found = [net.embed.weight if own_head is None else own_head], tensor
        elif name in expected:
            parts = [ours[one] for one in expected[name].names]
            found = tensor.T if expected[name].transposed else tensor
        elif NOT_WEIGHTS.fullmatch(name):
            continue
        else:
            raise BadInput(f"{folder}: holds a tensor {name} that {architecture.name} does not have")
        rows = [len(part) for part in parts]
        if found.shape != (sum(rows), *parts[0].shape[1:]):
            raise BadInput(f"{folder}: {name} has the shape {[*tensor.shape]}, which config.json does not fit")
        for part, piece in zip(parts, torch.split(found, rows), strict=True):
            part.copy_(piece)
        missing.discard(name)
    if missing:
        raise BadInput(f"{folder}: the tensor {min(missing)} is missing")


def full_name(name: str, expected: dict[str, Any]) -> str:
    """The name with the prefix that a file of the bare model, as that of GPT-2, leaves out."""
    prefix = next(iter(expected)).partition(".")[0]
    return f"{prefix}.{name}" if f"{prefix}.{name}" in expected else name


def shards(folder: Path) -> list[str]:
    """The names of the files with the weights. Raises BadInput if their index is damaged."""
    index = folder / INDEX
    if not index.is_file():
        return ["model.safetensors"]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        if any(Path(one).name != one for one in names):
            raise ValueError("it names a file outside of its folder")
        return sorted(names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{index}: {error}; expected the index of the safetensors files") from error


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the safetensors files, the largest first; a copy of the embedding as the head comes after it.

    The pages of a file that were read count as memory until it is closed, so it is opened for each tensor. With the
    largest first, while the rest of the model has no pages yet, the peak is near the model's size.
    """
    try:
        places = [place for one in shards(folder) for place in contents(folder / one)]
        for _, _, name, path in sorted(places):
            with safe_open(path, "pt") as file:
                tensor = file.get_tensor(name)
            yield name, tensor
    except (OSError, ValueError, SafetensorError) as error:
        what = str(error).splitlines()[0]
        raise BadInput(f"{folder}: {what}; expected model.safetensors, or its parts and their index") from error


def contents(path: Path) -> list[tuple[int, bool, str, Path]]:
    """The tensors of a file, with what `tensors` sorts them by."""
    with safe_open(path, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return [(-math.prod(shape), name == "lm_head.weight", name, path) for name, shape in shapes.items()]
