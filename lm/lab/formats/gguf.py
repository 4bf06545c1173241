"""A model as a GGUF file for llama.cpp and the programs built on it. The package `gguf` writes it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm.config import ModelConfig
from lm.data.tokenizer import Tokenizer
from lm.errors import UserError, missing_extra
from lm.lab.formats.huggingface import ARCHITECTURES, Architecture, architecture_of, matrices
from lm.lab.formats.output import check_finite, is_byte_level, new_folder
from lm.model.transformer import RoPE, Transformer
from lm.system.files import atomic_file

FILE = "model.gguf"
KINDS = [row for row in ARCHITECTURES if row.model_type in ("llama", "qwen3")]
NORMAL, CONTROL, UNUSED = 1, 3, 5  # of llama.cpp's types of tokens


def export_gguf(net: Transformer, tokenizer: Tokenizer, output_dir: str | Path, dtype: str = "f32") -> str:
    """Write model.gguf with matrices in `dtype`: f32, f16 or q8_0. Returns the architecture's name.

    Raises UserError naming the setting that llama.cpp has no model for, or the package that is missing.
    """
    try:
        import gguf
    except ImportError as error:
        raise missing_extra("format=gguf", "gguf", "gguf") from error
    kind = _architecture_in_gguf(net.config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.model_type.upper()], net.config.n_layers)
    writer = gguf.GGUFWriter(None, kind.model_type)
    for key, value in (_metadata(net) | _vocabulary(tokenizer, net.vocab_size)).items():
        getattr(writer, f"add_{key}")(value)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"])
    for name, matrix in matrices(net, kind).items():
        tensor = _rows_for_rope(name, matrix, kind, net.config)
        in_blocks = dtype != "q8_0" or tensor.shape[-1] % 32 == 0  # a block of q8_0 has 32 columns
        chosen = gguf.GGMLQuantizationType["F32" if tensor.ndim == 1 else dtype.upper() if in_blocks else "F16"]
        gguf_name = names.get_name(name, (".weight", ".bias"))
        assert gguf_name is not None, name
        with np.errstate(over="ignore", invalid="ignore"):
            values = gguf.quantize(tensor.numpy(), chosen)
            check_finite(name, gguf.dequantize(values, chosen), dtype)
        writer.add_tensor(gguf_name, values, raw_dtype=chosen)
    if net.config.rope_scaling is not None:
        assert isinstance(net.position, RoPE)
        plain, cpu = RoPE(replace(net.config, rope_scaling=None), net.seq_len), torch.device("cpu")
        factors = plain.frequencies(cpu) / net.position.frequencies(cpu)  # (K/2,), by which llama.cpp divides them
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    with new_folder(output_dir) as folder, atomic_file(folder / FILE) as file:
        writer.write_header_to_file(Path(file.name))
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return kind.name


def _metadata(net: Transformer) -> dict[str, Any]:
    """Return the argument of each method add_* of the writer, as `_vocabulary` does."""
    config = net.config
    return {
        "context_length": net.seq_len,
        "embedding_length": config.d_model,
        "feed_forward_length": config.d_ff,
        "block_count": config.n_layers,
        "head_count": config.n_heads,
        "head_count_kv": config.kv_heads,
        "key_length": config.head_dim,
        "value_length": config.head_dim,
        "rope_dimension_count": config.head_dim,
        "rope_freq_base": config.rope_theta,
        "layer_norm_rms_eps": config.norm_eps,
        "vocab_size": net.vocab_size,
    }


def _architecture_in_gguf(config: ModelConfig) -> Architecture:
    """Return Llama or Qwen3. Raises UserError naming the setting that neither has in llama.cpp."""
    kind = architecture_of(config, KINDS, "format=gguf: ")
    for key, value in (("attention_bias", config.attn_bias), ("rope_scaling", config.rope_scaling)):
        if kind.model_type == "qwen3" and value:
            raise UserError(f"format=gguf: model.{key}={str(value).lower()}: llama.cpp's Qwen3 does not support it")
    return kind


def _rows_for_rope(name: str, tensor: Tensor, kind: Architecture, config: ModelConfig) -> Tensor:
    """Return the rows of q and k in llama.cpp's order. Its Llama rotates (2i, 2i + 1), ours (i, i + K/2)."""
    tensor = tensor.detach().cpu()
    if kind.model_type != "llama" or not ("q_proj" in name or "k_proj" in name):
        return tensor
    halves = tensor.reshape(-1, 2, config.head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _vocabulary(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """Return tokens, types and merges. Raises UserError unless llama.cpp splits a text as the tokenizer does."""
    layout = json.loads(tokenizer.to_json())
    model = layout["model"]
    if not is_byte_level(layout) or not model["merges"]:
        raise UserError("format=gguf: this tokenizer cannot be carried; expected a BPE of this project (tokenizer=bpe)")
    words = {number: (word, NORMAL) for word, number in model["vocab"].items()}
    words |= {token["id"]: (token["content"], CONTROL) for token in layout["added_tokens"]}
    words |= {number: (f"<unused{number}>", UNUSED) for number in range(len(words), rows)}
    tokens, types = zip(*(words[number] for number in range(rows)), strict=True)
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "gpt-2",
        "bos_token_id": tokenizer.begin,
        "eos_token_id": tokenizer.eot,
        "add_bos_token": True,
        "add_eos_token": False,
        "token_list": tokens,
        "token_types": types,
        "token_merges": [" ".join(pair) for pair in model["merges"]],
    }
