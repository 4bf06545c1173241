"""A model as one HTML file: its weights, its tokenizer and a forward pass in JavaScript. It opens without a network.

In the templates, model.js computes, tokens.js draws tokens, and model_page.js does the rest.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from tokenizers import pre_tokenizers

from lm.data.text import ANYWHERE
from lm.data.tokenizer import Tokenizer
from lm.errors import UserError
from lm.lab.formats.output import check_finite, is_byte_level, new_folder
from lm.lab.report.pages import render
from lm.model.size import n_params
from lm.model.transformer import RoPE, Transformer
from lm.system.files import write_text

FILE = "model.html"
CARRIED = {  # what model.js has code for
    "model.linear": ("linear",),
    "model.norm": ("rmsnorm", "layernorm", "none"),
    "model.norm_order": ("pre", "post"),
    "model.ffn": ("relu", "relu2", "gelu", "gelu_tanh", "silu", "swiglu"),
    "model.position": ("rope", "learned", "none"),
}


def export_page(
    net: Transformer,
    tokenizer: Tokenizer,
    output_dir: str | Path,
    dtype: str = "f16",
    title: str = "A language model",
    prompt: str = "",
) -> Path:
    """Write model.html with matrices in `dtype`, f16 or f32, and `prompt` in its text field; returns the path.

    Raises UserError naming the setting that the page has no code for.
    """
    settings = {key: getattr(net.config, key.removeprefix("model.")) for key in CARRIED}
    unknown = [f"{key}={value}" for key, value in settings.items() if value not in CARRIED[key]]
    if unknown:
        raise UserError(f"format=page: {unknown[0]}: the page has no code for it")
    script = "".join(map(render, ("model.js", "tokens.js", "model_page.js")))
    page = render(
        "model.html.j2",
        title=title,
        prompt=prompt,
        n_params=n_params(net),
        config=_config(net),
        tokenizer=_vocabulary(tokenizer),
        tensors=_tensors(net, dtype),
        script=Markup(script),
        script_hash=_base64(hashlib.sha256(script.encode()).digest()),
    )
    with new_folder(output_dir) as folder:
        write_text(folder / FILE, page)
    return Path(output_dir, FILE)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _config(net: Transformer) -> dict[str, Any]:
    """Return the settings of the model, and what model.js reads beside them."""
    position, device = net.position, net.embed.weight.device
    return {
        **asdict(net.config),
        "head_dim": net.config.head_dim,
        "n_kv_heads": net.config.kv_heads,
        "frequencies": position.frequencies(device).tolist() if isinstance(position, RoPE) else None,
        "embedding_multiplier": net.embed.multiplier,
        "vocab_size": net.vocab_size,
        "seq_len": net.seq_len,
    }


def _tensors(net: Transformer, dtype: str) -> Iterator[tuple[str, str, Markup]]:
    """Yield name, dtype and base64 of each tensor: matrices in `dtype`, vectors in f32. A tied head has none."""
    weights = {name: tensor for name, tensor in net.state_dict().items() if not name.startswith("head.")}
    outputs = net.head.matrix(net.embed.weight)
    if outputs is not net.embed.weight:
        weights["head.weight"] = outputs
    for name, tensor in weights.items():
        chosen = "f32" if tensor.ndim == 1 else dtype
        with np.errstate(over="ignore"):
            values = tensor.detach().cpu().numpy().astype({"f16": "<f2", "f32": "<f4"}[chosen])
        check_finite(name, values, chosen)
        yield name, chosen, Markup(_base64(values.tobytes()))


def _vocabulary(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what `readTokenizer` of model.js takes. Raises UserError for a tokenizer of another kind."""
    layout = json.loads(tokenizer.to_json())
    model, vocab = layout["model"], layout["model"]["vocab"]
    is_char = model["type"] == "WordLevel" and tokenizer.cut is ANYWHERE and layout["decoder"] == {"type": "Fuse"}
    if not is_char and not is_byte_level(layout):
        raise UserError("format=page: the page has no such tokenizer; expected tokenizer=bpe, byte or char")
    names = {token["id"]: token["content"] for token in layout["added_tokens"]}  # all of them special
    words = {number: word for word, number in vocab.items() if number not in names}
    ordered = [words.get(number, "") for number in range(tokenizer.vocab_size)]
    # byte-level BPE writes some bytes as other characters: each of these, and its byte
    alphabet, latin1 = {ord(symbol) for symbol in pre_tokenizers.ByteLevel.alphabet()}, {*range(256)}
    latin = dict(zip(sorted(alphabet - latin1), sorted(latin1 - alphabet), strict=True))
    return {
        "tokens": [word.encode().decode("latin-1") if is_char else word.translate(latin) for word in ordered],
        "names": names,
        "merges": None if is_char else [[vocab[a], vocab[b], vocab[a + b]] for a, b in model["merges"]],
        "begin": tokenizer.begin,
        "stops": sorted(tokenizer.stops),
    }
