"""A model from a Hugging Face folder: config.json, safetensors and tokenizer.json, none of which can run code."""

import hashlib
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from lm.config import BadInput, HeadConfig, ModelConfig
from lm.config.checks import reading
from lm.config.typed import build
from lm.data.tokenizer import EOT_NAMES, Tokenizer, load_tokenizer
from lm.exchange.architectures import ACTIVATIONS, ARCHITECTURES, SCALING, Architecture
from lm.exchange.find_model import ModelSettings
from lm.exchange.weights import fill, shards, sources
from lm.model.transformer import Transformer
from lm.system.files import read_json, sha256

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
NAMES = "tokenizer_config.json"  # says which token is which
UNTIED = HeadConfig(name="untied_from_embedding", kind="untied_from_embedding", head_lr_multiplier=1.0)
HEADS = {True: HeadConfig(), False: UNTIED}  # by tie_word_embeddings


def pretrained_settings(folder: Path, settings: dict[str, Any]) -> ModelSettings:
    """What the config.json of a Hugging Face folder says, as our settings. Raises BadInput naming the key."""
    with reading(folder / "config.json", "what transformers writes"):
        architecture, model = model_config(settings)
        rows, seq_len = (build(int, settings[key], key) for key in ("vocab_size", architecture.keys["seq_len"]))
        found = ModelSettings(
            vocab_size=rows,
            seq_len=seq_len,
            model=replace(model, vocab_rows=rows),
            head=HEADS[bool(settings["tie_word_embeddings"])],
            sha256={},
            architecture=architecture.name,
        )
    sources(found, folder)
    return found


def load_pretrained(folder: Path, settings: ModelSettings) -> tuple[Transformer, Tokenizer]:
    """The model and the tokenizer of a Hugging Face folder, on the CPU in fp32. Raises BadInput naming key or file."""
    tokenizer = load_tokenizer(folder / "tokenizer.json", eot_name(folder))
    if tokenizer.eot_added:
        usual = ", ".join(EOT_NAMES)
        raise BadInput(f"{folder}: its tokenizer has no end-of-text token; expected eos_token in {NAMES}, or {usual}")
    if tokenizer.vocab_size > settings.vocab_size:
        raise BadInput(f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model {settings.vocab_size}")
    found, net = sources(settings, folder)
    fill(net.to_empty(device="cpu"), found, folder)
    return net.eval(), tokenizer


def eot_name(folder: Path) -> str | None:
    """The end-of-text token that tokenizer_config.json names, if there is such a file and it names one."""
    with suppress(OSError, BadInput), reading(folder / NAMES):
        found = read_json(folder / NAMES).get("eos_token")
        found = found.get("content") if isinstance(found, dict) else found
        return found if isinstance(found, str) else None
    return None


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
    return architecture, build(ModelConfig, ours, "model")


def scaling(rope: dict[str, Any]) -> list[float] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise BadInput(f"rope_type={kind}: is not supported; expected default or llama3")
    return None if kind == "default" else [float(rope[key]) for key in SCALING]
