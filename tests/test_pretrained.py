"""A Hugging Face folder gives the same logits here, and exported again it is the same."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import ApertusConfig, ArceeConfig, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config

from lm.config import UserError
from lm.data.vocabulary import byte_tokenizer
from lm.exchange.huggingface import export
from lm.exchange.portable import load_model, save_model

TOKENIZER = byte_tokenizer()
LLAMA: dict[str, Any] = {
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
GPT2 = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0}
FOLDERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "SmolLM2": lambda: LlamaConfig(**LLAMA, rms_norm_eps=1e-5, tie_word_embeddings=True),
    "Llama-3.2": lambda: LlamaConfig(
        **LLAMA,
        head_dim=16,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA_3},
    ),
    "Llama, untied, biases": lambda: LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True),
    "Llama, biases of attention": lambda: LlamaConfig(**LLAMA, attention_bias=True),
    "Qwen3": lambda: Qwen3Config(**LLAMA, head_dim=16, tie_word_embeddings=True),
    "Qwen3, untied, biases of attention": lambda: Qwen3Config(**LLAMA, head_dim=8, attention_bias=True),
    "Arcee": lambda: ArceeConfig(**LLAMA, head_dim=8),
    "Arcee, tanh": lambda: ArceeConfig(**LLAMA, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True),
    "Apertus": lambda: ApertusConfig(**LLAMA, hidden_act="relu2", pad_token_id=0),
    "GPT-2": lambda: GPT2Config(**GPT2, eos_token_id=0),
    "GPT-2, untied": lambda: GPT2Config(**GPT2, eos_token_id=0, n_inner=40, tie_word_embeddings=False),
}


def write_folder(folder: Path, config: PreTrainedConfig, **options: Any) -> transformers.PreTrainedModel:
    """What transformers writes, with random weights in which nothing is zero or one."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text(TOKENIZER.to_json())
    return theirs


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_equal_and_the_export_is_the_same(name: str, tmp_path: Path) -> None:
    theirs = write_folder(tmp_path, FOLDERS[name]())
    net, _ = load_model(tmp_path)
    tokens = torch.randint(257, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, net(tokens)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    export(net, TOKENIZER, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    again, _ = load_model(tmp_path / "out")
    assert (again.config, again.head_config) == (net.config, net.head_config)


def test_shards_and_half_precision(tmp_path: Path) -> None:
    write_folder(tmp_path, FOLDERS["Qwen3"](), max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    whole, _ = load_model(tmp_path)
    for shard in tmp_path.glob("model-*.safetensors"):
        save_file({key: value.bfloat16() for key, value in load_file(shard).items()}, shard)
    half, _ = load_model(tmp_path)
    for (name, one), other in zip(whole.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(one.bfloat16().float(), other), name
        assert other.dtype == torch.float32


def test_the_names_of_the_bare_gpt2(tmp_path: Path) -> None:
    """The file of GPT-2 on the Hub has no prefix, and holds the masks as well."""
    theirs = write_folder(tmp_path, FOLDERS["GPT-2"]())
    path = tmp_path / "model.safetensors"
    weights = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file(weights | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, path)
    net, _ = load_model(tmp_path)
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(net(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another kind": ("SmolLM2", {"model_type": "mistral"}, "model_type=mistral: cannot be read; expected one of llama"),
    "sliding windows": ("Qwen3", {"use_sliding_window": True}, "use_sliding_window=True: this project has no model"),
    "layer types": ("Qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types: only full_attention"),
    "partial rotary": ("SmolLM2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    "YaRN": ("SmolLM2", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type=yarn: is not supported"),
    "softcap": ("SmolLM2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    "xIELU": ("Apertus", {"hidden_act": "xielu"}, "hidden_act=xielu: is not supported in ApertusForCausalLM"),
    "quantised": ("SmolLM2", {"quantization_config": {"bits": 4}}, "quantization_config="),
    "other widths": ("SmolLM2", {"intermediate_size": 49}, "which config.json does not fit"),
    "more layers": ("SmolLM2", {"num_hidden_layers": 3}, "the tensor model.layers.2.input_layernorm.weight is missing"),
    "fewer layers": ("SmolLM2", {"num_hidden_layers": 1}, "holds a tensor model.layers.1."),
    "no head": ("SmolLM2", {"tie_word_embeddings": False}, "the tensor lm_head.weight is missing"),
    "fewer rows": ("SmolLM2", {"vocab_size": 299}, "which config.json does not fit"),
    "not a number": ("SmolLM2", {"hidden_size": "wide"}, "not what transformers writes"),
    "a width of nothing": ("SmolLM2", {"hidden_size": 0}, "config.json"),
    "half a layer": ("SmolLM2", {"num_hidden_layers": 2.5}, "config.json: model.n_layers: expected int, found 2.5"),
    "no heads": ("SmolLM2", {"num_attention_heads": 0}, "not what transformers writes"),
    "an endless context": ("SmolLM2", {"max_position_embeddings": math.inf}, "max_position_embeddings: expected int"),
    "an endless epsilon": ("SmolLM2", {"rms_norm_eps": math.inf}, "model.norm_eps=inf"),
    "layers without end": ("SmolLM2", {"num_hidden_layers": 10**4}, "too few for the 10000 layers"),
    "more than any memory": ("SmolLM2", {"intermediate_size": 10**15}, "which config.json does not fit"),
    "more than a tensor can have": ("SmolLM2", {"intermediate_size": 10**30}, "expected 1 or more, at most"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_carried_is_refused_by_its_key(case: str, tmp_path: Path) -> None:
    name, changed, expected = REFUSED[case]
    write_folder(tmp_path, FOLDERS[name]())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(UserError) as error:
        load_model(tmp_path)
    assert expected in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, LlamaConfig(**LLAMA | {"vocab_size": 200}))
    with pytest.raises(UserError, match="the tokenizer has 257 tokens, the model 200"):
        load_model(tmp_path)


def test_what_apertus_takes_where_its_file_is_silent(tmp_path: Path) -> None:
    """Its frequencies are scaled; those of the other architectures are not."""
    write_folder(tmp_path, FOLDERS["Apertus"]())
    said, path = load_model(tmp_path)[0].config, tmp_path / "config.json"
    rest = {key: value for key, value in json.loads(path.read_text()).items() if not key.startswith("rope")}
    path.write_text(json.dumps(rest))
    assert load_model(tmp_path)[0].config == said


@pytest.mark.parametrize("content", ['{"eos_token": 5}', '{"eos_token": {"content": []}}', "[" * 100_000, "5"])
def test_names_of_tokens_that_are_no_names(content: str, tmp_path: Path) -> None:
    write_folder(tmp_path, FOLDERS["SmolLM2"]())
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.to_json().replace("<|endoftext|>", END))
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match="its tokenizer has no end-of-text token"):
        load_model(tmp_path)


def test_a_head_that_contradicts_the_tie_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, FOLDERS["SmolLM2"]())
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path)
    load_model(tmp_path)  # a copy is none
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(UserError, match="differs from the embedding, but tie_word_embeddings is true"):
        load_model(tmp_path)


def test_a_folder_of_ours_made_from_one_of_theirs_is_the_same_model(tmp_path: Path) -> None:
    """Also with more rows in the embedding than the tokenizer has tokens."""
    write_folder(tmp_path / "theirs", FOLDERS["Qwen3"]())
    net, tokenizer = load_model(tmp_path / "theirs")
    assert (tokenizer.vocab_size, net.vocab_size) == (257, 300)
    save_model(net, tokenizer, tmp_path / "ours")
    again, other = load_model(tmp_path / "ours")
    tokens = torch.arange(40)[None]
    assert torch.equal(again(tokens), net(tokens))
    assert other.hash == tokenizer.hash


BEGIN, END = "<|begin_of_text|>", "<done>"


def llama_3(*special: str) -> tokenizers.Tokenizer:
    """A byte-level tokenizer that puts BEGIN before a text, as those of Llama 3 do."""
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    backend.add_special_tokens(list(special))
    template = processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[(special[0], backend.token_to_id(special[0]))]
    )
    backend.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return backend


def test_a_text_begins_as_the_tokenizer_says_and_ends_at_either_token(tmp_path: Path) -> None:
    write_folder(tmp_path, FOLDERS["SmolLM2"]())
    llama_3(BEGIN).save(str(tmp_path / "tokenizer.json"))
    _, tokenizer = load_model(tmp_path)
    assert (tokenizer.eot_token, tokenizer.begin_token) == ("<|endoftext|>", BEGIN)
    assert tokenizer.separator == [tokenizer.eot, tokenizer.begin]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert theirs("def f").input_ids == [tokenizer.begin, *tokenizer.encode("def f")]


def test_the_end_of_text_may_have_a_name_of_its_own(tmp_path: Path) -> None:
    """tokenizer_config.json says it; saved as a model of ours, the name stays. Without a name nothing is added."""
    write_folder(tmp_path / "theirs", FOLDERS["SmolLM2"]())
    backend = json.loads(TOKENIZER.to_json().replace("<|endoftext|>", END))
    (tmp_path / "theirs/tokenizer.json").write_text(json.dumps(backend))
    with pytest.raises(UserError, match="its tokenizer has no end-of-text token; expected eos_token in tokenizer_conf"):
        load_model(tmp_path / "theirs")
    (tmp_path / "theirs/tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    net, tokenizer = load_model(tmp_path / "theirs")
    assert (tokenizer.eot_token, tokenizer.eot, tokenizer.vocab_size) == (END, 0, 257)
    save_model(net, tokenizer, tmp_path / "ours")
    assert load_model(tmp_path / "ours")[1].eot_token == END
    (tmp_path / "theirs/tokenizer_config.json").write_text(json.dumps({"eos_token": "<absent>"}))
    with pytest.raises(UserError, match="has no token <absent>, which is said to be its end of text"):
        load_model(tmp_path / "theirs")


def test_a_chat_model_ends_a_text_at_the_usual_token(tmp_path: Path) -> None:
    """Its eos_token ends a turn of the conversation; the token is the same after a model of ours was saved."""
    write_folder(tmp_path / "theirs", FOLDERS["Qwen3"]())
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    backend.add_special_tokens(["<|im_end|>"])
    backend.save(str(tmp_path / "theirs/tokenizer.json"))
    (tmp_path / "theirs/tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    net, tokenizer = load_model(tmp_path / "theirs")
    save_model(net, tokenizer, tmp_path / "ours")
    for one in (tokenizer, load_model(tmp_path / "ours")[1]):
        assert (one.eot_token, one.begin_token) == ("<|endoftext|>", "<|endoftext|>")


@pytest.mark.parametrize("name", ["../outside.safetensors", "absent.safetensors"])
def test_an_index_leads_to_files_of_its_folder_only(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path, FOLDERS["SmolLM2"]())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match=r"outside of its folder|absent"):
        load_model(tmp_path)


def test_an_index_that_cannot_be_read(tmp_path: Path) -> None:
    write_folder(tmp_path, FOLDERS["SmolLM2"]())
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="not the index of the safetensors files"):
        load_model(tmp_path)
