"""A GGUF file has our weights, our tokens and, in llama.cpp, our logits."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from conftest import Outcome, tiny
from helpers.models import noisy
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lm.data.tokenizer import Tokenizer, train_bpe
from lm.errors import UserError
from lm.folder import save_model
from lm.lab.formats.gguf import export_gguf
from lm.model.transformer import Transformer

BPE = train_bpe([Path(__file__).read_text()], 300)
LLAMA = {"norm": "rmsnorm", "position": "rope", "ffn": "swiglu"}
QWEN3 = LLAMA | {"qk_norm": True}
CARRIED: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaForCausalLM", "tied", LLAMA | {"n_kv_heads": 2, "vocab_rows": 310}),
    ("LlamaForCausalLM", "tied_scaled", LLAMA | {"norm_eps": 1e-3}),
    ("LlamaForCausalLM", "tied_projected", LLAMA | {"rope_theta": 500.0}),
    ("Qwen3ForCausalLM", "tied", QWEN3),
    ("Qwen3ForCausalLM", "untied", QWEN3 | {"n_kv_heads": 2, "d_head": 16, "norm_eps": 1e-6, "vocab_rows": 310}),
]
UNREAD = [  # by transformers, which does not know these of a GGUF file
    ("LlamaForCausalLM", "untied", LLAMA | {"bias": True}),
    ("LlamaForCausalLM", "untied", LLAMA | {"rope_scaling": [8.0, 1.0, 4.0, 32.0]}),
    ("LlamaForCausalLM", "tied", LLAMA | {"attention_bias": True, "d_head": 6}),
]
TEXT = "it's 1,234  naïve\n\n\tdef f(x): <|endoftext|> 日本 🙂 "


def model(head: str = "tied", vocab_size: int = 300, **changes: Any) -> Transformer:
    return noisy(tiny(**changes), head, vocab_size, seq_len=128)


@pytest.mark.parametrize(("name", "head", "changes"), CARRIED)
def test_transformers_reads_the_same_model(name: str, head: str, changes: dict[str, Any], tmp_path: Path) -> None:
    net = model(head, **changes)
    assert export_gguf(net, BPE, tmp_path / "out") == name
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.gguf"]
    config = AutoConfig.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    config.head_dim = net.config.head_dim  # which transformers does not read for Qwen3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", config=config)
    tokens = torch.randint(300, (2, 60), generator=torch.Generator().manual_seed(0))
    expected = net(tokens)
    assert (loaded(tokens).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert loaded.config.tie_word_embeddings == (head == "tied")


def test_matrices_may_have_fewer_bits(tmp_path: Path) -> None:
    """Vectors stay f32, and a matrix whose rows are not whole blocks is f16. The tokenizer is ours."""
    net = model(**LLAMA, d_ff=48)
    step = net.embed.weight.abs().max().item() / 127
    for dtype, expected in (("f16", ("F16", "F16", "F32")), ("q8_0", ("Q8_0", "F16", "F32"))):
        export_gguf(net, BPE, tmp_path / dtype, dtype)
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / dtype / "model.gguf").tensors}
        names = ("blk.0.ffn_up.weight", "blk.0.ffn_down.weight", "output_norm.weight")
        assert tuple(tensors[name].tensor_type.name for name in names) == expected
        matrix = tensors["token_embd.weight"]
        weights = gguf.dequantize(matrix.data, matrix.tensor_type)
        np.testing.assert_allclose(weights, net.embed.weight.detach().numpy(), rtol=0, atol=0.51 * step)
    words = AutoTokenizer.from_pretrained(tmp_path / "f16", gguf_file="model.gguf")
    assert words(TEXT, add_special_tokens=False, split_special_tokens=True).input_ids == BPE.encode(TEXT)


def with_added(*tokens: str | AddedToken) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(BPE.to_json())
    backend.add_tokens([*tokens])
    return Tokenizer(backend)


def test_special_tokens_and_unused_rows_have_their_types(tmp_path: Path) -> None:
    tokenizer = with_added(AddedToken("<|x|>", special=True, lstrip=True))
    export_gguf(model(vocab_size=tokenizer.vocab_size + 1, **LLAMA), tokenizer, tmp_path / "out")
    fields = gguf.GGUFReader(tmp_path / "out/model.gguf").fields
    types = [gguf.TokenType(int(value)).name for value in fields["tokenizer.ggml.token_type"].contents()]
    assert (types[tokenizer.eot], types[1]) == ("CONTROL", "NORMAL")
    assert types[BPE.vocab_size :] == ["CONTROL", "UNUSED"]


def test_without_the_package_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"format=gguf: the package gguf is not installed; pip install gguf"):
        export_gguf(model(**LLAMA), BPE, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_writes_the_file(command: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    save_model(model(**QWEN3), BPE, tmp_path / "run/model")
    words = ("export", f"run_dir={tmp_path}/run", f"output_dir={tmp_path}/out", "format=gguf", "dtype=q8_0")
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    assert out.startswith(f"{tmp_path}/out/model.gguf: Qwen3ForCausalLM")


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "head", "changes"), [*CARRIED, *UNREAD])
def test_llama_cpp_generates_the_same_tokens(name: str, head: str, changes: dict[str, Any], tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    net, prompt = model(head, **changes), [BPE.begin, *BPE.encode(TEXT)]
    for dtype, bound in (("f32", 1e-5), ("f16", 5e-3), ("q8_0", 0.1)):
        export_gguf(net, BPE, tmp_path / dtype, dtype)
        file, f32 = str(tmp_path / dtype / "model.gguf"), llama_cpp.GGML_TYPE_F32
        loaded = llama_cpp.Llama(file, n_ctx=0, n_threads=1, logits_all=True, type_k=f32, type_v=f32, verbose=False)
        assert loaded.tokenize(TEXT.encode(), special=False) == prompt
        loaded.eval(prompt)
        with torch.no_grad():
            expected = net(torch.tensor([prompt]))[0].numpy()
        assert np.abs(loaded.scores[: len(prompt)] - expected).max() <= bound * np.abs(expected).max()
        if dtype == "f32":
            ids = list(prompt)
            for _ in range(32):
                ids.append(int(net(torch.tensor([ids]))[0, -1].argmax()))
                assert int(loaded.scores[loaded.n_tokens - 1].argmax()) == ids[-1]
                loaded.eval(ids[-1:])
