"""Exported models that transformers reads, and its folders that load_model reads: equal logits and tensors."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from conftest import SEQ, tiny
from helpers.models import equal, noisy
from safetensors.torch import load_file, save_file
from transformers import (
    ApertusConfig,
    ArceeConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from lm.data.tokenizer import byte_tokenizer, char_tokenizer, train_bpe
from lm.decoding import generate
from lm.errors import UserError
from lm.folder import load_model, save_model
from lm.lab.formats.adapter import save_adapter
from lm.lab.formats.huggingface import SYNONYMS, export
from lm.lab.lora import merged
from lm.model.linear import is_adapter
from lm.model.transformer import Transformer

BYTE = byte_tokenizer()
TOKENIZERS = {
    "byte": BYTE,
    "char": char_tokenizer(["the quick brown fox\n"]),
    "bpe": train_bpe(["the quick brown fox jumps over the lazy dog " * 9], 270),
}
TOKENS = torch.randint(257, (2, SEQ), generator=torch.Generator().manual_seed(0))
LLAMA = {"norm": "rmsnorm", "position": "rope", "ffn": "swiglu"}
GPT2 = {"norm": "layernorm", "position": "learned"}
MODELS: list[tuple[str, str, dict[str, Any]]] = [  # each architecture with every head and setting that it has, in pairs
    ("LlamaForCausalLM", "tied", LLAMA | {"bias": True, "rope_theta": 500.0}),
    ("LlamaForCausalLM", "untied", LLAMA | {"n_kv_heads": 2, "rope_scaling": [8.0, 1.0, 4.0, 32.0], "norm_eps": 1e-3}),
    ("LlamaForCausalLM", "tied_projected", LLAMA | {"attention_bias": True, "d_head": 6}),
    ("Qwen3ForCausalLM", "tied", LLAMA | {"qk_norm": True, "n_kv_heads": 2, "d_head": 16, "norm_eps": 1e-6}),
    ("Qwen3ForCausalLM", "untied_midtraining", LLAMA | {"qk_norm": True, "attention_bias": True}),
    ("Qwen2ForCausalLM", "untied", LLAMA | {"attention_bias": "qkv", "n_kv_heads": 1}),
    ("ArceeForCausalLM", "tied_scaled", LLAMA | {"ffn": "relu2", "n_kv_heads": 2}),
    ("ArceeForCausalLM", "untied", LLAMA | {"ffn": "gelu", "bias": True}),
    ("ApertusForCausalLM", "tied", LLAMA | {"ffn": "relu", "qk_norm": True, "rope_theta": 100.0}),
    ("ApertusForCausalLM", "untied", LLAMA | {"ffn": "silu", "qk_norm": True, "n_kv_heads": 2}),
    ("GPT2LMHeadModel", "tied", GPT2 | {"ffn": "gelu_tanh", "bias": True, "n_kv_heads": 2}),
    ("GPT2LMHeadModel", "untied_from_embedding", GPT2 | {"ffn": "relu"}),
    ("GPT2LMHeadModel", "tied_projected", GPT2 | {"ffn": "relu2", "attention_bias": "qkv"}),
]


@torch.no_grad()
def gap(net: Transformer, model: Any, tokens: torch.Tensor = TOKENS) -> float:
    """The largest difference of the logits as a fraction of the largest one."""
    expected = model(tokens).logits
    return float((net(tokens) - expected).abs().max() / expected.abs().max())


# --- out


@pytest.mark.parametrize(("name", "head", "changes"), MODELS)
def test_transformers_reads_what_is_exported(name: str, head: str, changes: dict[str, Any], tmp_path: Path) -> None:
    net = noisy(tiny(**changes), head, 257)
    assert export(net, BYTE, tmp_path / "out") == name
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert gap(net, model) < 1e-5
    assert model.config.tie_word_embeddings == (head == "tied")
    prompt = TOKENS[:1, :4]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "attention_mask": prompt * 0 + 1}
    answer, tokens = model.generate(prompt, **options), prompt
    for _ in range(8):
        tokens = torch.cat((tokens, net(tokens)[:, -1:].argmax(-1)), dim=1)
    assert answer.tolist() == tokens.tolist()
    net.get_parameter("blocks.0.attn.v_proj.weight").data.mul_(1.1)
    assert gap(net, model) > 1e-4, "the comparison sees a changed matrix"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_exported_tokenizer_and_generated_text_are_equal(kind: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[kind]
    net = noisy(tiny(**LLAMA), "untied", tokenizer.vocab_size)
    export(net, tokenizer, tmp_path / "out")
    model, words = (auto.from_pretrained(tmp_path / "out") for auto in (AutoModelForCausalLM, AutoTokenizer))
    texts = ["the quick brown fox\n", *(["a <|endoftext|> b"] if kind != "char" else [])]
    for text in texts:  # what spells a special token is ordinary text
        assert words(text)["input_ids"] == [tokenizer.eot, *tokenizer.encode(text)]
        assert words.decode(tokenizer.encode(text)) == text
    assert (words.eos_token_id, words.model_max_length) == (tokenizer.eot, SEQ)
    prompts = ["the quick", "fox", ""]
    batch = words(prompts, return_tensors="pt", padding=True)  # prompts of unequal length are padded on the left
    answers = model.generate(**batch, max_new_tokens=6, do_sample=False)[:, batch["input_ids"].shape[1] :]
    assert words.batch_decode(answers, skip_special_tokens=True) == generate(net, tokenizer, prompts, 6)
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert settings["model_input_names"] == ["input_ids", "attention_mask"], "transformers 4 adds another"


def test_an_interrupted_export_is_written_anew_and_a_folder_of_other_files_is_not(tmp_path: Path) -> None:
    net = noisy(tiny(**LLAMA), "tied", 257)

    def fail(folder: Path) -> None:
        (folder / ".partial-x").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(net, BYTE, tmp_path / "out", fail)
    for name in ("out", "again"):
        export(net, BYTE, tmp_path / name)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("out", "again")]
    assert files[0] == files[1]
    with pytest.raises(UserError, match=r"^output_dir="):
        export(net, BYTE, tmp_path / "out")


TRANSFORMERS_4 = """
import json, sys
from pathlib import Path
import peft, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

assert transformers.__version__.startswith("4.")
for folder, (ids, logits, prompts, texts) in json.loads(Path("expected.json").read_text()).items():
    kind = peft.AutoPeftModelForCausalLM if folder.endswith("adapter") else AutoModelForCausalLM
    model, tokenizer = kind.from_pretrained(folder), AutoTokenizer.from_pretrained(folder.removesuffix("-adapter"))
    encoded, expected = tokenizer(prompts[0], return_tensors="pt"), torch.tensor(logits)
    assert encoded["input_ids"].tolist() == ids, folder
    with torch.no_grad():
        assert (model(**encoded).logits - expected).abs().max() < 1e-5 * expected.abs().max(), folder
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    answers = model.generate(**batch, max_new_tokens=6, do_sample=False)[:, batch["input_ids"].shape[1] :]
    assert tokenizer.batch_decode(answers, skip_special_tokens=True) == texts, folder
"""


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("pip") is None, reason="needs pip, which installs transformers 4")
@torch.no_grad()
def test_transformers_4_gives_the_same_logits_and_texts(tmp_path: Path) -> None:
    """Of each architecture, with each tokenizer, of prompts in a batch, and of an adapter by PEFT."""
    packages = ["transformers>=4.57,<5", "huggingface_hub<1", "tokenizers<=0.23.0"]  # beside the torch of these tests
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "site"), *packages]
    subprocess.run(pip, check=True, timeout=600)
    models, expected = [*MODELS, ("LlamaForCausalLM", "tied", LLAMA | {"linear": "lora"})], {}
    for i, (name, head, changes) in enumerate(models):
        tokenizer, folder = [*TOKENIZERS.values()][i % 3], f"{i}-{name}"
        net = noisy(tiny(**changes), head, tokenizer.vocab_size, seq_len=64)
        plain = {key: value for key, value in net.state_dict().items() if not is_adapter(key)}
        base = noisy(merged(net).config, head, tokenizer.vocab_size, seq_len=64)
        base.load_state_dict(plain)
        export(base, tokenizer, tmp_path / folder)
        if net.config.adapted:
            save_adapter(net, folder, tmp_path / f"{folder}-adapter")
            folder += "-adapter"
        prompts = ["the quick", "fox", ""]
        ids = [[tokenizer.begin, *tokenizer.encode(prompts[0])]]
        expected[folder] = ids, net(torch.tensor(ids)).tolist(), prompts, generate(net, tokenizer, prompts, 6)
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    words = [sys.executable, "-c", TRANSFORMERS_4]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


# --- in

SIZES: dict[str, Any] = {
    "vocab_size": 300,  # more rows than tokens
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA_3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
GPT2_SIZES = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0}
FOLDERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "SmolLM2": lambda: LlamaConfig(**SIZES, rms_norm_eps=1e-5, tie_word_embeddings=True, hidden_act="swish"),
    "Llama-3.2": lambda: LlamaConfig(
        **SIZES,
        head_dim=16,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA_3},
    ),
    "Llama, untied, biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "Qwen2": lambda: Qwen2Config(**SIZES, rms_norm_eps=1e-5),
    "Qwen3": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "Qwen3, untied, biases of attention": lambda: Qwen3Config(**SIZES, head_dim=8, attention_bias=True),
    "Arcee": lambda: ArceeConfig(**SIZES, hidden_act="gelu_pytorch_tanh", head_dim=16),
    "Apertus": lambda: ApertusConfig(**SIZES, hidden_act="relu2", pad_token_id=0),
    "GPT-2": lambda: GPT2Config(**GPT2_SIZES, eos_token_id=0),
    "GPT-2, untied": lambda: GPT2Config(**GPT2_SIZES, eos_token_id=0, n_inner=40, tie_word_embeddings=False),
}


def write_folder(folder: Path, config: PreTrainedConfig, **options: Any) -> transformers.PreTrainedModel:
    """What transformers writes, with random weights in which nothing is zero or one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text(BYTE.to_json())
    return model


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_gives_equal_logits_and_its_export_is_the_same(name: str, tmp_path: Path) -> None:
    model = write_folder(tmp_path / "published", FOLDERS[name]())
    net, tokenizer = load_model(tmp_path / "published")
    assert gap(net, model, torch.randint(257, (2, 48), generator=torch.Generator().manual_seed(0))) <= 1e-5
    export(net, tokenizer, tmp_path / "out")
    assert equal(*(load_file(tmp_path / name / "model.safetensors") for name in ("published", "out")))
    save_model(net, tokenizer, tmp_path / "saved")
    for folder in ("out", "saved"):
        again, _ = load_model(tmp_path / folder)
        assert (again.config, again.head_config, again.vocab_size) == (net.config, net.head_config, 300)
        assert torch.equal(again(TOKENS), net(TOKENS))


@pytest.mark.parametrize("name", [*SYNONYMS])
def test_another_name_of_an_activation_is_read(name: str, tmp_path: Path) -> None:
    model = write_folder(tmp_path, ArceeConfig(**SIZES, hidden_act=name))
    assert gap(load_model(tmp_path)[0], model) < 1e-5


def test_shards_and_half_precision(tmp_path: Path) -> None:
    write_folder(tmp_path, FOLDERS["Qwen3"](), max_shard_size="20KB")
    whole, _ = load_model(tmp_path)
    for shard in tmp_path.glob("model-*.safetensors"):
        save_file({key: value.bfloat16() for key, value in load_file(shard).items()}, shard)
    half, _ = load_model(tmp_path)
    for (name, parameter), other in zip(whole.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(parameter.bfloat16().float(), other), name
        assert other.dtype == torch.float32


def with_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {  # what is named -> a folder and what its config.json says instead
    "model_type=mistral": ("SmolLM2", {"model_type": "mistral"}),
    "use_sliding_window=True": ("Qwen2", {"use_sliding_window": True}),
    "layer_types": ("Qwen3", {"layer_types": ["sliding_attention"] * 2}),
    "rope_type=yarn": ("SmolLM2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}),
    "final_logit_softcapping=30.0": ("SmolLM2", {"final_logit_softcapping": 30.0}),
    "hidden_act=xielu": ("Apertus", {"hidden_act": "xielu"}),
    "quantization_config=": ("SmolLM2", {"quantization_config": {"bits": 4}}),
    "model.layers.0.mlp.down_proj.weight": ("SmolLM2", {"intermediate_size": 49}),
    "missing tensor lm_head.weight": ("SmolLM2", {"tie_word_embeddings": False}),
    "257 tokens, the model 200": ("SmolLM2", {"vocab_size": 200}),
}
DAMAGED: dict[str, tuple[str, bytes]] = {
    "model.safetensors": ("model.safetensors", b"x" * 100),
    "tokenizer.json": ("tokenizer.json", b"{}"),
    "absent.safetensors": ("model.safetensors.index.json", b'{"weight_map": {"a": "absent.safetensors"}}'),
    "adapter_config.json": ("adapter_config.json", b'{"peft_type": "LORA", "base_model_name_or_path": "/elsewhere"}'),
}


@pytest.mark.parametrize("named", [*REFUSED, *DAMAGED])
def test_what_cannot_be_carried_is_refused_in_one_line(named: str, tmp_path: Path) -> None:
    name, changes = REFUSED.get(named, ("SmolLM2", {}))
    write_folder(tmp_path, FOLDERS[name]())
    with_config(tmp_path, **changes)
    if named in DAMAGED:
        filename, content = DAMAGED[named]
        (tmp_path / filename).write_bytes(content)
        if filename.endswith("index.json"):
            (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError) as caught:
        load_model(tmp_path)
    message = str(caught.value)
    assert named in message or named in DAMAGED  # which transformers may say in other words
    assert message.startswith(str(tmp_path))
    assert "\n" not in message


def test_no_code_of_a_folder_runs(tmp_path: Path) -> None:
    """Neither a class of its own, nor a kernel of the Hub, nor a pickle."""
    write_folder(tmp_path, FOLDERS["SmolLM2"]())
    mark = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    foreign = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    with_config(tmp_path, auto_map=foreign, attn_implementation="nobody/kernel")
    load_model(tmp_path)  # as the Llama that it is
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load_model(tmp_path)
    assert not mark.exists()


def test_a_head_that_contradicts_the_tie_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, FOLDERS["SmolLM2"]())
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})
    load_model(tmp_path)  # a copy is none
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, path, {"format": "pt"})
    with pytest.raises(UserError, match="tie_word_embeddings"):
        load_model(tmp_path)


def test_a_folder_is_converted_once_and_afterwards_needs_no_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, FOLDERS["SmolLM2"]())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        with pytest.raises(UserError, match=r"pip install 'transformers>=5,<6'"):
            load_model(tmp_path)
    net, _ = load_model(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert torch.equal(load_model(tmp_path)[0](TOKENS), net(TOKENS))
    assert len([*(tmp_path / "cache").rglob("model.safetensors")]) == 1
    with_config(tmp_path, rms_norm_eps=1e-3)
    with pytest.raises(UserError, match="transformers"):
        load_model(tmp_path)  # of other content


# --- where a text begins and ends

END = "<done>"


def test_the_end_of_text_may_have_a_name_of_its_own(tmp_path: Path) -> None:
    """tokenizer_config.json says it; saved in the own format, the name stays."""
    write_folder(tmp_path / "published", FOLDERS["SmolLM2"]())
    names = tmp_path / "published/tokenizer_config.json"
    (tmp_path / "published/tokenizer.json").write_text(BYTE.to_json().replace("<|endoftext|>", END))
    for content in ("{}", '{"eos_token": {"content": []}}', "5", '{"eos_token": "<absent>"}'):
        names.write_text(content)
        with pytest.raises(UserError, match="<absent>" if "absent" in content else "no end-of-text token"):
            load_model(tmp_path / "published")
    names.write_text(json.dumps({"eos_token": {"content": END}}))
    net, tokenizer = load_model(tmp_path / "published")
    assert (tokenizer.eot_token, tokenizer.eot, tokenizer.vocab_size) == (END, 0, 257)
    save_model(net, tokenizer, tmp_path / "saved")
    assert load_model(tmp_path / "saved")[1].eot_token == END


def added(content: str, number: int) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(number): {"content": content, "special": False}}}


@pytest.mark.parametrize(
    ("filename", "content"),
    [
        ("tokenizer_config.json", added("<think>", 257)),
        ("tokenizer_config.json", added("<|endoftext|>", 1)),
        ("added_tokens.json", {"<think>": 257}),
    ],
)
def test_a_token_that_only_transformers_adds_is_refused(filename: str, content: Any, tmp_path: Path) -> None:
    write_folder(tmp_path, FOLDERS["SmolLM2"]())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added("<|endoftext|>", 0)))
    load_model(tmp_path)
    (tmp_path / filename).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"tokenizer\.json lacks the added token '<.*save_pretrained"):
        load_model(tmp_path)


def test_a_chat_model_is_read_as_a_plain_text_model(tmp_path: Path) -> None:
    """What the folder says of a chat is not carried into an export. The usual token separates documents."""
    write_folder(tmp_path / "chat", FOLDERS["Qwen2"]())
    backend = tokenizers.Tokenizer.from_str(BYTE.to_json())
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(tmp_path / "chat/tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    (tmp_path / "chat/tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "chat/generation_config.json").write_text(json.dumps({"eos_token_id": [258, 0]}))
    net, tokenizer = load_model(tmp_path / "chat")
    assert (tokenizer.eot_token, tokenizer.begin_token, tokenizer.stops) == ("<|endoftext|>", "<|endoftext|>", {0})
    export(net, tokenizer, tmp_path / "out")
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (words.eos_token, words.chat_template) == ("<|endoftext|>", None)
