"""Models as folders of Hugging Face transformers, out and in.

Each architecture of transformers that computes the same as a model of this project is described once, in ARCHITECTURES.
The weights are the same tensors under other names, so the logits are the same too. `export` reads the table from left
to right; `converted` reads the table from right to left, and uses no code and no pickle of a folder.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers.processors import TemplateProcessing

from lm.config import DataConfig, HeadConfig, ModelConfig, build
from lm.data.tokenizer import EOT_NAMES, Tokenizer, load_tokenizer
from lm.errors import UserError, missing_extra, reading
from lm.folder import TOKENIZER, WEIGHTS, save_model, write_weights
from lm.lab.formats.output import new_folder
from lm.model.linear import Linear
from lm.model.transformer import Transformer
from lm.system.files import json_sha256, read_json, rename_folder, scratch_folder, sha256, write_text
from lm.system.terminal import to_override_value

Weights = dict[str, torch.Tensor]
Settings = dict[str, Any]
log = logging.getLogger(__name__)


# --- the table


@dataclass(frozen=True, kw_only=True)
class Architecture:
    name: str  # the class in transformers
    model_type: str
    keys: dict[str, str]  # our setting -> theirs; the context length is ours as seq_len
    accepts: dict[str, tuple[object, ...]]  # our setting -> its possible values; other settings may have any value
    parts: dict[str, str]  # our name of a module or matrix -> theirs; others have the same name
    trunk: str = "model"  # their name of all but the head
    constants: Settings = field(default_factory=dict)  # of config.json, where the default is another
    is_gpt2: bool = False  # stores matrices as (in, out), keys and values for each query head, and all biases

    def unsupported(self, config: ModelConfig) -> list[str]:
        """Return the settings whose values the architecture does not have."""
        settings = _resolved(config)
        keys = [key for key, values in self.accepts.items() if settings[key] not in values]
        square = config.n_heads * config.head_dim == config.d_model
        return keys if square or "d_head" in self.keys else [*keys, "d_head"]

    def names(self, own_names: Iterable[str]) -> dict[str, list[str]]:
        """Return their name of each tensor with ours; several of ours are joined along the first dimension."""
        names: dict[str, list[str]] = {}
        for name in own_names:
            parts = (self.parts.get(part, part) for part in name.split("."))
            names.setdefault(".".join([self.trunk, *parts]), []).append(name)
        return names

    def is_transposed(self, own_name: str) -> bool:
        return self.is_gpt2 and own_name.endswith("_proj.weight")


LLAMA_KEYS = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_head": "head_dim",
    "ffn": "hidden_act",
    "norm_eps": "rms_norm_eps",
    "seq_len": "max_position_embeddings",
}
GPT2_KEYS = {
    "d_model": "n_embd",
    "d_ff": "n_inner",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "ffn": "activation_function",
    "norm_eps": "layer_norm_epsilon",
    "seq_len": "n_positions",
}
ATTENTION_BIAS = {"attention_bias": "attention_bias"}
MLP_BIAS = {"bias": "mlp_bias"}
LLAMA_PARTS = {
    "embed": "embed_tokens",
    "blocks": "layers",
    "attn": "self_attn",
    "ffn": "mlp",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
GPT2_PARTS = {
    "embed": "wte",
    "position": "wpe",
    "blocks": "h",
    "ffn": "mlp",
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
    "norm": "ln_f",
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "c_attn"),
    "up_proj": "c_fc",
    **dict.fromkeys(("o_proj", "down_proj"), "c_proj"),
}
GATED, UNGATED = ("swiglu",), ("relu", "gelu", "gelu_tanh", "relu2", "silu")
PRE_NORM: Settings = {"norm_order": ("pre",)}
ROPE: Settings = {"position": ("rope",), "norm": ("rmsnorm",), "attention_bias": (False, True, "qkv")} | PRE_NORM
LEARNED: Settings = {"position": ("learned",), "norm": ("layernorm",)} | PRE_NORM
APERTUS_PARTS = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
PLAIN, NORMED, NO_BIAS = {"qk_norm": (False,)}, {"qk_norm": (True,)}, {"bias": (False,)}


def _like_llama(model_type: str, keys: dict[str, str], accepts: Settings, **parts: str) -> Architecture:
    """Return a Llama but for further keys, for what the architecture accepts, and for the names of some parts."""
    name = f"{model_type.capitalize()}ForCausalLM"
    keys, accepts, parts = LLAMA_KEYS | keys, ROPE | accepts, LLAMA_PARTS | parts
    return Architecture(name=name, model_type=model_type, keys=keys, accepts=accepts, parts=parts)


ARCHITECTURES = (
    _like_llama("llama", ATTENTION_BIAS | MLP_BIAS, PLAIN | {"ffn": GATED}),
    _like_llama("qwen3", ATTENTION_BIAS, NORMED | {"ffn": GATED} | NO_BIAS),
    # Only read: transformers 5 gives every Qwen2 the tokenizer of Qwen2. Llama with o_proj.bias = 0 computes the same.
    _like_llama("qwen2", {}, PLAIN | {"ffn": GATED, "attention_bias": ("qkv",)} | NO_BIAS),
    _like_llama("arcee", ATTENTION_BIAS | MLP_BIAS, PLAIN | {"ffn": UNGATED}),
    _like_llama("apertus", ATTENTION_BIAS, NORMED | {"ffn": UNGATED} | NO_BIAS, **APERTUS_PARTS),
    Architecture(
        name="GPT2LMHeadModel",
        model_type="gpt2",
        keys=GPT2_KEYS,
        accepts=LEARNED | PLAIN | {"ffn": UNGATED},
        parts=GPT2_PARTS,
        trunk="transformer",
        constants={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        is_gpt2=True,
    ),
)
ACTIVATIONS = {
    "swiglu": "silu",
    "silu": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
}
SYNONYMS = {  # other names in transformers, of the same functions
    "swish": "silu",
    "gelu_python": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_pytorch_tanh"),
}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def architecture_of(
    config: ModelConfig, among: Sequence[Architecture] = ARCHITECTURES, where: str = ""
) -> Architecture:
    """Return the first architecture that computes the same. Raises UserError naming the setting that none has."""
    for architecture in among:
        if not architecture.unsupported(config):
            return architecture
    nearest = min(among, key=lambda other: len(other.unsupported(config)))
    key = nearest.unsupported(config)[0]
    setting = f"{where}model.{key}={to_override_value(getattr(config, key))}"
    raise UserError(f"{setting}: cannot be exported, {nearest.name} does not support it; see docs/export.md")


def _resolved(config: ModelConfig) -> Settings:
    """Return every setting, with a value in the place of each null that stands for another setting's."""
    values = {"n_kv_heads": config.kv_heads, "d_head": config.head_dim, "attention_bias": config.attn_bias}
    return asdict(config) | values


# --- out


def export(
    net: Transformer, tokenizer: Tokenizer, output_dir: str | Path, also: Callable[[Path], object] = lambda _: None
) -> str:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load, and return the name of the architecture.

    `also` is called with the folder and may add files. Raises UserError naming the setting that no architecture has.
    """
    architecture = architecture_of(net.config)
    weights = matrices(net, architecture)
    eot = tokenizer.eot_token
    ids = {"bos_token_id": tokenizer.begin, "eos_token_id": tokenizer.eot, "pad_token_id": tokenizer.eot}
    files: dict[str, Any] = {
        "config.json": {
            "architectures": [architecture.name],
            "vocab_size": net.vocab_size,
            "tie_word_embeddings": "lm_head.weight" not in weights,
            **ids,
            "dtype": str(next(iter(weights.values())).dtype).removeprefix("torch."),
            **_their_settings(architecture, net),
        },
        "generation_config.json": ids | {"eos_token_id": sorted(tokenizer.stops)},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",  # a class that transformers 4 has too
            "model_max_length": net.seq_len,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,  # a text that spells a special token is ordinary text
            "model_input_names": ["input_ids", "attention_mask"],  # without token_type_ids, which transformers 4 adds
            "padding_side": "left",  # so that a batch of prompts of unequal length is continued as each alone
            "bos_token": tokenizer.begin_token,
            "eos_token": eot,
            "pad_token": eot,
        },
    }
    with new_folder(output_dir) as folder:
        write_weights(folder / WEIGHTS, weights)
        write_text(folder / TOKENIZER, _with_template(tokenizer))
        for filename, content in files.items():
            write_text(folder / filename, json.dumps(content, indent=2) + "\n")
        also(folder)
    return architecture.name


def _their_settings(architecture: Architecture, net: Transformer) -> Settings:
    config = net.config
    settings = _resolved(config) | {"seq_len": net.seq_len, "ffn": ACTIVATIONS[config.ffn]}
    settings["attention_bias"] = bool(settings["attention_bias"])
    renamed = {
        "model_type": architecture.model_type,
        **{name: settings[key] for key, name in architecture.keys.items()},
    }
    if config.position != "rope":
        return renamed | architecture.constants
    scaled = dict(zip(SCALING, config.rope_scaling or (), strict=bool(config.rope_scaling)))
    scaling = {"rope_type": "llama3", **scaled} if scaled else {"rope_type": "default"}
    rope = {"rope_parameters": {**scaling, "rope_theta": config.rope_theta}}
    of_version_4 = {"rope_theta": config.rope_theta, "rope_scaling": scaling if scaled else None}
    return renamed | architecture.constants | rope | of_version_4


def matrices(net: Transformer, architecture: Architecture) -> Weights:
    """Return all weights under the architecture's names; without lm_head.weight if the model is tied."""
    if not all(type(module) is Linear for name, module in net.named_modules() if name.endswith("_proj")):
        raise UserError(f"model.linear={net.config.linear}: only models with model.linear=linear are exported")
    inputs, outputs = net.embed.matrix(), net.head.matrix(net.embed.weight)
    trunk = {name: tensor for name, tensor in net.state_dict().items() if not name.startswith("head.")}
    trunk["embed.weight"] = inputs
    if net.config.attn_bias == "qkv":  # the architectures have all four biases or none
        names = (f"blocks.{i}.attn.o_proj.bias" for i in range(net.config.n_layers))
        trunk |= {name: inputs.new_zeros(net.config.d_model) for name in names}
    trunk = _as_gpt2(trunk, net.config) if architecture.is_gpt2 else trunk
    weights = {} if inputs is outputs else {"lm_head.weight": outputs}
    for name, own_names in architecture.names(trunk).items():
        tensors = [trunk[own_name] for own_name in own_names]
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        weights[name] = tensor.T if architecture.is_transposed(own_names[0]) else tensor
    return weights


def _as_gpt2(weights: Weights, config: ModelConfig) -> Weights:
    """Return the weights with keys and values for each query head, and with all biases."""
    complete = Weights()
    for name, tensor in weights.items():
        if ".k_proj." in name or ".v_proj." in name:
            by_head = tensor.view(config.kv_heads, config.head_dim, *tensor.shape[1:])
            tensor = by_head.repeat_interleave(config.n_heads // config.kv_heads, 0).flatten(0, 1)
        complete[name] = tensor
        if name.startswith(("blocks.", "norm.")) and name.endswith(".weight"):
            complete.setdefault(name.removesuffix("weight") + "bias", tensor.new_zeros(tensor.shape[0]))
    return complete


def _with_template(tokenizer: Tokenizer) -> str:
    """Return the tokenizer.json with a step that puts the first token before a text, as lm.decoding does."""
    backend, name = tokenizers.Tokenizer.from_str(tokenizer.to_json()), tokenizer.begin_token
    templates = {"single": [name, "$A"], "pair": [name, "$A", "$B:1"]}  # lists, because the name may hold a space
    backend.post_processor = TemplateProcessing(**templates, special_tokens=[(name, tokenizer.begin)])
    return backend.to_str()


# --- in

TOKENIZER_CONFIG, ADDED, ADAPTER = "tokenizer_config.json", "added_tokens.json", "adapter_config.json"
SPECIAL = "special_tokens_map.json"
NEUTRAL: dict[str, object] = {  # keys that change what a model computes, with the value of a model that we have
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "is_causal": True,
    "quantization_config": None,
}
MASKS = (".attn.bias", ".attn.masked_bias")  # constants that older versions of transformers saved with GPT-2
UNTIED = HeadConfig(name="untied_from_embedding", kind="untied_from_embedding", head_lr_multiplier=1.0)
OPTIONS: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def converted(folder: Path) -> Path:
    """Return the model folder of ours that a folder of transformers was converted into, once, in the cache.

    The name of the new folder is a hash of the files that are read, and of this module.
    Raises UserError naming the key or file that cannot be read, and OSError for the cache.
    """
    files = (path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    hashes = {path.name: sha256(path) for path in files} | {"converter": sha256(Path(__file__))}
    place = DataConfig().cache / "models" / json_sha256(hashes)[:16]
    if not place.exists():
        log.info("%s is a folder of transformers; its model is converted once, into %s", folder, place)
        with _transformers(folder) as transformers:
            net, tokenizer = _read(folder, transformers)
        with scratch_folder(place.parent) as scratch:
            save_model(net, tokenizer, scratch)
            rename_folder(scratch, place)
    return place


@contextmanager
def _transformers(folder: Path) -> Iterator[Any]:
    """Yield the library, silent. What is raised inside becomes a UserError that names the folder."""
    try:
        import transformers
    except ImportError as error:
        raise missing_extra(str(folder), "transformers", "hf") from error
    logging: Any = transformers.utils.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield transformers
    except UserError as error:
        raise UserError(str(error) if str(error).startswith(str(folder)) else f"{folder}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # each of its parts has kinds of its own
        message = " ".join(str(error).split())
        raise UserError(f"{folder}: transformers cannot read it ({type(error).__name__}: {message:.200})") from error
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _read(folder: Path, transformers: Any) -> tuple[Transformer, Tokenizer]:
    """Return the model and the tokenizer of a folder, on the CPU in fp32."""
    model_type = read_json(folder / "config.json")["model_type"]
    architecture = next((row for row in ARCHITECTURES if row.model_type == model_type), None)
    if architecture is None:
        kinds = ", ".join(row.model_type for row in ARCHITECTURES)
        raise UserError(f"model_type={model_type}: cannot be read; expected {kinds}")
    config = transformers.AutoConfig.from_pretrained(folder, **OPTIONS)
    own_config = replace(_own_config(config, architecture), vocab_rows=config.vocab_size)
    tokenizer = _read_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}")
    if (folder / ADAPTER).exists():  # transformers would load the model that it names
        raise UserError(f"holds an adapter ({ADAPTER}); expected the merged model, see PEFT")
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
            if architecture.is_gpt2 and str(key).endswith(MASKS):
                continue
            raise UserError(f"{kind} tensor {key if isinstance(key, str) else key[0]}; see config.json")
    if config.tie_word_embeddings != (model.get_input_embeddings().weight is model.get_output_embeddings().weight):
        raise UserError("lm_head.weight differs from the embedding, but tie_word_embeddings is true")
    head, seq_len = (
        HeadConfig() if config.tie_word_embeddings else UNTIED,
        getattr(config, architecture.keys["seq_len"]),
    )
    with torch.device("meta"):
        net = Transformer(own_config, head, vocab_size=config.vocab_size, seq_len=seq_len)
    net.load_state_dict(_own_weights(net, model.state_dict(), architecture), assign=True)
    return net.eval(), tokenizer


def _own_config(config: Any, architecture: Architecture) -> ModelConfig:
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


def _own_weights(net: Transformer, weights: Weights, architecture: Architecture) -> Weights:
    """Return the weights of transformers under our names."""
    parameters = dict(net.named_parameters())
    trunk = [name for name in parameters if not name.startswith("head.")]
    renamed = dict.fromkeys(parameters.keys() - trunk, weights["lm_head.weight"])
    for name, own_names in architecture.names(trunk).items():
        tensor = weights[name].T if architecture.is_transposed(own_names[0]) else weights[name]
        parts = torch.split(tensor, [len(parameters[own_name]) for own_name in own_names])
        renamed |= {own_name: part.contiguous() for own_name, part in zip(own_names, parts, strict=True)}
    return renamed


def _read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of tokenizer.json. Raises UserError if other files add tokens to it in transformers."""
    names = _json_of(folder / TOKENIZER_CONFIG)
    eos = names.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    tokenizer = load_tokenizer(folder / TOKENIZER, eos if isinstance(eos, str) else None)
    if tokenizer.eot_added:
        usual = ", ".join(EOT_NAMES)
        raise UserError(f"its tokenizer has no end-of-text token; expected eos_token in {TOKENIZER_CONFIG}, or {usual}")
    special = [
        value
        for settings in (names, _json_of(folder / SPECIAL))
        for key, value in settings.items()
        if key.endswith(("_token", "special_tokens"))
    ]
    added = dict[str, Any].fromkeys(_contents(special))  # content -> id; None: no file has the id
    added |= _json_of(folder / ADDED)
    with reading(folder / TOKENIZER_CONFIG, "what transformers wrote"):
        added |= {token["content"]: int(i) for i, token in (names.get("added_tokens_decoder") or {}).items()}
    for content, i in added.items():
        own = tokenizer.backend.token_to_id(content)
        if own is None or i not in (None, own):
            number = "" if i is None else f" (id {i})"
            cure = f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}') writes it"
            raise UserError(f"{TOKENIZER} lacks the token {content!r}{number}, which transformers adds; {cure}")
    return tokenizer


def _contents(value: Any) -> Iterator[str]:
    """Yield the tokens that the value of pad_token, of additional_special_tokens, or of a list of such values has."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _contents(value["content"] if "content" in value else [*value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from _contents(item)


def _json_of(path: Path) -> dict[str, Any]:
    """Return the content of a file that a folder need not have, or of which only some keys matter."""
    with suppress(OSError, ValueError):
        return read_json(path)
    return {}
