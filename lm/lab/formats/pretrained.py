"""A model from a folder of Hugging Face transformers, which reads its settings and its weights.

No code of the folder and no pickle is used.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lm.config import HeadConfig, ModelConfig, build
from lm.data.tokenizer import EOT_NAMES, Tokenizer, load_tokenizer
from lm.errors import UserError, reading
from lm.folder import TOKENIZER, ModelSettings
from lm.lab.formats.architectures import ACTIVATIONS, ARCHITECTURES, SCALING, SYNONYMS, Architecture, Weights
from lm.model.transformer import Transformer
from lm.system.files import read_json, sha256

NAMES = "tokenizer_config.json"  # says which token is which
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
UNTIED = HeadConfig(name="untied_from_embedding", kind="untied_from_embedding", head_lr_multiplier=1.0)
OPTIONS: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def pretrained_settings(folder: Path, model_type: Any) -> ModelSettings:
    """What the folder says of its model, as our settings. Raises UserError naming the key."""
    place = folder / "config.json"
    architecture = next((row for row in ARCHITECTURES if row.model_type == model_type), None)
    if architecture is None:
        kinds = ", ".join(row.model_type for row in ARCHITECTURES)
        raise UserError(f"{place}: model_type={model_type}: cannot be read; expected {kinds}")
    with _transformers(place) as transformers:
        config = transformers.AutoConfig.from_pretrained(folder, **OPTIONS)
        return ModelSettings(
            vocab_size=config.vocab_size,
            seq_len=getattr(config, architecture.keys["seq_len"]),
            model=replace(_model_config(config, architecture), vocab_rows=config.vocab_size),
            head=HeadConfig() if config.tie_word_embeddings else UNTIED,
            sha256={},
            architecture=architecture.name,
        )


def load_pretrained(folder: Path, settings: ModelSettings) -> tuple[Transformer, Tokenizer]:
    """The model and the tokenizer of the folder, on the CPU in fp32. Raises UserError naming key or file."""
    tokenizer = load_tokenizer(folder / TOKENIZER, _eos_name(folder))
    with _transformers(folder) as transformers:
        if tokenizer.eot_added:
            usual = ", ".join(EOT_NAMES)
            raise UserError(f"its tokenizer has no end-of-text token; expected eos_token in {NAMES}, or {usual}")
        if tokenizer.vocab_size > settings.vocab_size:
            raise UserError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {settings.vocab_size}")
        if (folder / "adapter_config.json").exists():  # transformers would load the model that it names
            raise UserError("holds an adapter (adapter_config.json); expected the merged model, see PEFT")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            use_safetensors=True,
            attn_implementation="eager",  # config.json may name a kernel of the Hub, which is code
            ignore_mismatched_sizes=True,  # they are reported, and refused below
            output_loading_info=True,
            **OPTIONS,
        )
        for kind in ("missing", "unexpected", "mismatched"):
            for key in sorted(report[f"{kind}_keys"], key=str):
                raise UserError(f"{kind} tensor {key if isinstance(key, str) else key[0]}; see config.json")
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        if tied != (settings.head.kind == "tied"):
            raise UserError("lm_head.weight differs from the embedding, but tie_word_embeddings is true")
        with torch.device("meta"):
            net = Transformer(settings.model, settings.head, vocab_size=settings.vocab_size, seq_len=settings.seq_len)
        architecture = next(row for row in ARCHITECTURES if row.name == settings.architecture)
        net.load_state_dict(_our_weights(net, model.state_dict(), architecture), assign=True)
    return net.eval(), tokenizer


def weights_hash(folder: Path) -> str:
    """Of all safetensors files of the folder, each read once in a process as long as it does not change."""
    paths = sorted(folder.glob("*.safetensors"))
    hashes = [_file_hash(path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


@cache
def _file_hash(path: Path, size: int, changed: int) -> str:
    return sha256(path)


@contextmanager
def _transformers(place: Path) -> Iterator[Any]:
    """The library, silent. What is raised inside becomes a UserError that names the place."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"{place}: needs transformers to be read; pip install 'transformers>=5,<6'") from error
    logging: Any = transformers.utils.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield transformers
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # each of its parts has kinds of its own
        message = " ".join(str(error).split())
        raise UserError(f"{place}: transformers cannot read it ({type(error).__name__}: {message:.200})") from error
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _model_config(config: Any, architecture: Architecture) -> ModelConfig:
    rope = getattr(config, "rope_parameters", None) or {}
    for key, neutral in NEUTRAL.items():
        if (value := rope.get(key, getattr(config, key, neutral))) != neutral:
            raise UserError(f"{key}={value}: this project has no model of this kind; expected {neutral}")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise UserError("layer_types: only full_attention is supported in every layer")
    if (kind := rope.get("rope_type", "default")) not in ("default", "llama3"):
        raise UserError(f"rope_type={kind}: is not supported; expected default or llama3")
    values: dict[str, Any] = {key: choices[0] for key, choices in architecture.accepts.items()}
    values |= {key: getattr(config, name, None) for key, name in architecture.keys.items() if key != "seq_len"}
    ffns: Any = architecture.accepts["ffn"]  # silu is SwiGLU's activation in one architecture, and the FFN's in another
    activations: dict[Any, str] = {ACTIVATIONS[ffn]: ffn for ffn in ffns}
    if (ffn := activations.get(SYNONYMS.get(values["ffn"], values["ffn"]))) is None:
        raise UserError(f"{architecture.keys['ffn']}={values['ffn']}: is not supported in {architecture.name}")
    values["ffn"] = ffn
    if values["position"] == "rope":
        values["rope_theta"] = float(rope["rope_theta"])
        values["rope_scaling"] = [float(rope[key]) for key in SCALING] if kind == "llama3" else None
    if architecture.is_gpt2:
        values |= {"bias": True, "d_ff": values["d_ff"] or 4 * values["d_model"]}
    implied = {
        "d_head": values["d_model"] // values["n_heads"],
        "n_kv_heads": values["n_heads"],
        "attention_bias": values["bias"],
    }
    values |= {key: None for key, value in implied.items() if values.get(key) == value}
    model: ModelConfig = build(ModelConfig, values, "model")
    return model


def _our_weights(net: Transformer, weights: Weights, architecture: Architecture) -> Weights:
    """The weights of transformers under our names."""
    parameters = dict(net.named_parameters())
    trunk = [name for name in parameters if not name.startswith("head.")]
    renamed = dict.fromkeys(parameters.keys() - trunk, weights["lm_head.weight"])
    for name, own_names in architecture.names(trunk).items():
        tensor = weights[name].T if architecture.transposed(own_names[0]) else weights[name]
        parts = torch.split(tensor, [len(parameters[own_name]) for own_name in own_names])
        renamed |= {own_name: part.contiguous() for own_name, part in zip(own_names, parts, strict=True)}
    return renamed


def _eos_name(folder: Path) -> str | None:
    """Return the end-of-text token that tokenizer_config.json names, if there is such a file and it names one."""
    with suppress(OSError, UserError), reading(folder / NAMES):
        name = read_json(folder / NAMES).get("eos_token")
        name = name.get("content") if isinstance(name, dict) else name
        return name if isinstance(name, str) else None
    return None
