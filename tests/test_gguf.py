"""A GGUF file has our weights, our tokens and, in llama.cpp, our logits."""

import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from conftest import tiny
from tokenizers import AddedToken

from lm.data.tokenizer import Tokenizer, train_bpe
from lm.errors import UserError
from lm.lab.formats.gguf import export_gguf
from tests.helpers.models import LLAMA, assert_same_model, exported, noisy

BPE = train_bpe([Path(__file__).read_text()], 300)
TEXT = "it's 1,234  naïve\n\n\tdef f(x): <|endoftext|> 日本 🙂 "


def model(head="tied", vocab_size=BPE.vocab_size, **changes):
    return noisy(tiny(**changes), head, vocab_size, seq_len=128)


@pytest.mark.parametrize(("name", "head", "changes"), exported("gguf"))
def test_transformers_reads_the_same_model(name, head, changes, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    net = model(head, **changes)
    assert export_gguf(net, BPE, tmp_path / "out") == name
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.gguf"]
    config = AutoConfig.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    config.head_dim = net.config.head_dim  # which transformers does not read for Qwen3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", config=config)
    assert_same_model(net, lambda tokens: loaded(tokens).logits)
    assert loaded.config.tie_word_embeddings == (head == "tied")


def test_matrices_may_have_fewer_bits(tmp_path):
    """Vectors stay f32, and a matrix whose rows are not whole blocks is f16. The tokenizer is ours."""
    import gguf
    from transformers import AutoTokenizer

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


def test_special_tokens_and_unused_rows_have_their_types(tmp_path):
    import gguf

    backend = tokenizers.Tokenizer.from_str(BPE.to_json())
    backend.add_tokens([AddedToken("<|x|>", special=True, lstrip=True)])
    tokenizer = Tokenizer(backend)
    export_gguf(model(vocab_size=tokenizer.vocab_size + 1, **LLAMA), tokenizer, tmp_path / "out")
    fields = gguf.GGUFReader(tmp_path / "out/model.gguf").fields
    types = [gguf.TokenType(int(value)).name for value in fields["tokenizer.ggml.token_type"].contents()]
    assert (types[tokenizer.eot], types[1]) == ("CONTROL", "NORMAL")
    assert types[BPE.vocab_size :] == ["CONTROL", "UNUSED"]


def test_without_the_package_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"format=gguf: the package gguf is not installed; pip install gguf"):
        export_gguf(model(**LLAMA), BPE, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "head", "changes"), exported("gguf", "llama.cpp"))
def test_llama_cpp_generates_the_same_tokens(name, head, changes, tmp_path):
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
