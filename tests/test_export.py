"""What transformers loads has the same logits and the same greedy tokens."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HEADS, SEQ, some, tiny
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm.config import ModelConfig, UserError
from lm.data.tokenizer import Tokenizer
from lm.data.vocabulary import byte_tokenizer, char_tokenizer, train_bpe
from lm.exchange.huggingface import export
from lm.inference.generate import generate
from lm.model.head import Embedding, TiedProjectedHead
from lm.model.transformer import Transformer

LLAMA = {"norm": "rmsnorm", "position": "rope", "ffn": "swiglu"}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": LLAMA,
    "LlamaForCausalLM with biases": {**LLAMA, "bias": True, "rope_theta": 500.0},
    "Qwen3ForCausalLM": {**LLAMA, "qk_norm": True},
    "ArceeForCausalLM relu2": {**LLAMA, "ffn": "relu2"},
    "ArceeForCausalLM gelu": {**LLAMA, "ffn": "gelu", "bias": True},
    "ApertusForCausalLM relu2": {**LLAMA, "ffn": "relu2", "qk_norm": True},
    "ApertusForCausalLM relu": {**LLAMA, "ffn": "relu", "qk_norm": True, "rope_theta": 100.0},
    "LlamaForCausalLM scaled": {**LLAMA, "rope_scaling": [8.0, 1.0, 4.0, 32.0], "norm_eps": 1e-3},
    "LlamaForCausalLM biases of attention": {**LLAMA, "attention_bias": True, "d_head": 6},
    "Qwen3ForCausalLM wide heads": {**LLAMA, "qk_norm": True, "d_head": 16, "norm_eps": 1e-6},
    "GPT2LMHeadModel relu": {"norm": "layernorm", "position": "learned", "ffn": "relu", "bias": True},
    "GPT2LMHeadModel gelu": {"norm": "layernorm", "position": "learned", "ffn": "gelu"},
    "GPT2LMHeadModel gelu_tanh": {"norm": "layernorm", "position": "learned", "ffn": "gelu_tanh", "bias": True},
    "GPT2LMHeadModel relu2": {"norm": "layernorm", "position": "learned", "ffn": "relu2"},
}
MAIN = ("tied", "untied")  # with every configuration; the other variants with one of each architecture
MODELS = [
    *((name, head, n_kv_heads) for name in CONFIGS for head in MAIN for n_kv_heads in (None, 2)),
    *((name, head, None) for name in list(CONFIGS)[::2] for head in HEADS if head not in MAIN),
]
TOKENIZERS = {
    "byte": byte_tokenizer(),
    "char": char_tokenizer(["the quick brown fox\n"]),
    "bpe": train_bpe(["the quick brown fox jumps over the lazy dog " * 9], 270),
}


def net_for(config: ModelConfig, head: str, tokenizer: Tokenizer) -> Transformer:
    net = Transformer(config, HEADS[head], vocab_size=tokenizer.vocab_size, seq_len=SEQ).eval()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():  # initial zeros, ones and copies would hide a swapped norm, bias or matrix
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return net


@pytest.mark.parametrize(("name", "head", "n_kv_heads"), some(MODELS, 2))
def test_logits_and_greedy_tokens_are_equal(name: str, head: str, n_kv_heads: int | None, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["byte"]
    net = net_for(tiny(n_kv_heads=n_kv_heads, **CONFIGS[name]), head, tokenizer)
    assert export(net, tokenizer, tmp_path / "out") == name.split()[0]
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(tokenizer.vocab_size, (2, SEQ), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(tokens).logits, net(tokens), rtol=0, atol=2e-5)
    assert sum(p.numel() for p in theirs.parameters()) >= sum(p.numel() for p in net.parameters())
    assert theirs.config.tie_word_embeddings == (head == "tied")
    prompt = tokens[:1, :4]
    answer = theirs.generate(
        prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, attention_mask=prompt * 0 + 1
    )
    ours = prompt
    for _ in range(8):
        ours = torch.cat((ours, net(ours)[:, -1:].argmax(-1)), dim=1)
    assert answer.tolist() == ours.tolist()


def test_the_comparison_sees_a_changed_matrix(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["byte"]
    net = net_for(tiny(**LLAMA), "tied", tokenizer)
    export(net, tokenizer, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        net.blocks[0].attn.k_proj.weight.mul_(1.01)
    tokens = torch.arange(SEQ)[None]
    assert (theirs(tokens).logits - net(tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("head", HEADS)
def test_the_file_holds_the_input_and_output_embeddings(head: str, tmp_path: Path) -> None:
    """However they are computed; one matrix where they are the same."""
    tokenizer = TOKENIZERS["byte"]
    net = net_for(tiny(**LLAMA), head, tokenizer)
    export(net, tokenizer, tmp_path / "out")
    weights = load_file(tmp_path / "out/model.safetensors")
    embedding, own = net.embed.weight, next(net.head.parameters(), None)
    inputs, outputs = {
        "tied": lambda: (embedding, None),
        "tied_scaled": lambda: (math.sqrt(32) * embedding, embedding),
        "tied_projected": lambda: (embedding, embedding @ own),
    }.get(head, lambda: (embedding, own))()
    assert torch.equal(weights["model.embed_tokens.weight"], inputs)
    assert ("lm_head.weight" in weights) == (outputs is not None)
    assert outputs is None or torch.equal(weights["lm_head.weight"], outputs)


@pytest.mark.parametrize(("head", "part"), [("tied_scaled", Embedding), ("tied_projected", TiedProjectedHead)])
def test_the_comparison_sees_a_missing_multiplier_or_projection(
    head: str, part: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exported with the embedding alone, neither variant gives its logits."""
    tokenizer, tokens = TOKENIZERS["byte"], torch.arange(SEQ)[None]
    net = net_for(tiny(**LLAMA), head, tokenizer)
    monkeypatch.setattr(part, "matrix", lambda self, embedding=None: self.weight if embedding is None else embedding)
    export(net, tokenizer, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (theirs(tokens).logits - net(tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_exported_tokenizer_is_equal(kind: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[kind]
    export(net_for(tiny(**LLAMA), "tied", tokenizer), tokenizer, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the quick brown fox\n"
    assert theirs(text)["input_ids"] == [tokenizer.eot, *tokenizer.encode(text)], "as lm.inference begins"
    if kind != "char":
        spelled = "a <|endoftext|> b"
        assert theirs(spelled)["input_ids"] == [tokenizer.eot, *tokenizer.encode(spelled)], "ordinary text"
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.eot
    assert theirs.model_max_length == SEQ


def test_generated_text_is_equal(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["bpe"]
    net = net_for(tiny(**LLAMA), "untied", tokenizer)
    export(net, tokenizer, tmp_path / "out")
    theirs, words = (one.from_pretrained(tmp_path / "out") for one in (AutoModelForCausalLM, AutoTokenizer))
    prompt = words("the quick", return_tensors="pt")
    answer = theirs.generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert words.decode(answer, skip_special_tokens=True) == generate(net, tokenizer, "the quick", 6)


@pytest.mark.parametrize(
    ("changes", "switch"),
    [
        ({**LLAMA, "position": "none"}, r"model\.position=none"),
        (
            {**LLAMA, "ffn": "relu2", "qk_norm": True, "bias": True},
            r"model\.bias=true: cannot be exported, ApertusForCausalLM",
        ),
        ({**LLAMA, "norm": "layernorm"}, r"model\.norm=layernorm"),
        ({**LLAMA, "qk_norm": True, "bias": True}, r"model\.bias=true"),
        ({"norm": "layernorm", "position": "learned", "ffn": "swiglu"}, r"model\.ffn=swiglu"),
        ({"norm": "layernorm", "position": "learned", "ffn": "gelu", "qk_norm": True}, r"model\.qk_norm=true"),
        ({**LLAMA, "linear": "torch.nn.Linear"}, r"model\.linear=torch\.nn\.Linear"),
    ],
)
def test_a_setting_that_no_architecture_has_is_named(changes: dict[str, Any], switch: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["byte"]
    with pytest.raises(UserError, match=switch):
        export(net_for(tiny(**changes), "tied", tokenizer), tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    with pytest.raises(UserError, match="output_dir"):
        export(net_for(tiny(**LLAMA), "tied", TOKENIZERS["byte"]), TOKENIZERS["byte"], tmp_path)
    assert (tmp_path / "precious").read_text() == "keep me"


def test_the_default_model_can_be_exported(tmp_path: Path) -> None:
    from lm.cli.compose import compose
    from lm.config import RunConfig

    run = compose("train", [], RunConfig)
    small = replace(run.model, n_layers=1, d_model=run.model.n_heads * 8, d_ff=32)
    assert export(net_for(small, "tied", TOKENIZERS["byte"]), TOKENIZERS["byte"], tmp_path / "out")


def test_an_interrupted_export_is_written_anew_and_a_folder_of_other_files_is_not(tmp_path: Path) -> None:
    net = net_for(tiny(**LLAMA), "tied", TOKENIZERS["byte"])

    def fail(folder: Path) -> None:
        (folder / ".partial-x").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(net, TOKENIZERS["byte"], tmp_path / "out", fail)
    export(net, TOKENIZERS["byte"], tmp_path / "out")
    export(net, TOKENIZERS["byte"], tmp_path / "again")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()
    }
    with pytest.raises(UserError, match="is not empty"):
        export(net, TOKENIZERS["byte"], tmp_path / "out")
