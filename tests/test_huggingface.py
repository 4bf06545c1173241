"""Exports that transformers and llama.cpp read, and folders of transformers that load_model reads: equal logits."""

import json
import re
import shutil
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken

from lm.data.tokenizer import Tokenizer, byte_tokenizer, char_tokenizer, train_bpe
from lm.decoding import generate
from lm.folder import load_model, save_model
from lm.lab.formats.gguf import export_gguf
from lm.lab.formats.huggingface import SYNONYMS, export
from tests.helpers.models import LLAMA, assert_same_model, equal, exported, noisy, random_tokens
from tests.helpers.refusals import refused
from tests.helpers.tiny import SEQ

BYTE, CHAR = byte_tokenizer(), char_tokenizer(["the quick brown fox\n"])
TOKENIZERS = {
    "byte": BYTE,
    "char": CHAR,
    "bpe": train_bpe(["the quick brown fox jumps over the lazy dog " * 9], 270),
}


# --- out


@pytest.mark.parametrize(("name", "head", "changes"), exported("transformers"))
def test_transformers_reads_what_is_exported(name, head, changes, tmp_path):
    """Model and tokenizer. For some architectures transformers has a tokenizer of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    net = noisy(head, 257, **changes)
    assert export(net, BYTE, tmp_path / "out") == name
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_model(net, lambda tokens: model(tokens).logits)
    assert model.config.tie_word_embeddings == (head == "tied")
    text = "the quick\nbrown fox"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == [BYTE.begin, *BYTE.encode(text)]


def test_a_model_in_bfloat16_is_exported_as_one(tmp_path):
    from transformers import AutoConfig

    export(noisy("tied", 257, **LLAMA).bfloat16(), BYTE, tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_exported_tokenizer_and_generated_text_are_equal(kind, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = TOKENIZERS[kind]
    net = noisy("untied", tokenizer.vocab_size, **LLAMA)
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


def test_a_folder_of_other_files_is_refused_and_one_that_an_interruption_left_is_written_anew(tmp_path):
    (tmp_path / "mine").touch()
    net = noisy("tied", 257, **LLAMA)
    with refused(r"^output_dir="):
        export(net, BYTE, tmp_path)
    (tmp_path / ".unfinished").touch()
    export(net, BYTE, tmp_path)


# --- in

SIZES = {
    "vocab_size": 300,  # more rows than tokens
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
TIE = {"tie_word_embeddings": True}
LLAMA_3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SCALED = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA_3}}
GPT2_SIZES = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2_SIZES |= {"bos_token_id": 0, "eos_token_id": 0}
FOLDERS = {  # what is published -> its configuration in transformers
    "SmolLM2": ("LlamaConfig", SIZES | TIE | {"rms_norm_eps": 1e-5, "hidden_act": "swish"}),
    "Llama-3.2": ("LlamaConfig", SIZES | TIE | SCALED | {"head_dim": 16}),
    "Llama, untied, biases": ("LlamaConfig", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "Qwen2": ("Qwen2Config", SIZES | {"rms_norm_eps": 1e-5}),
    "Qwen3": ("Qwen3Config", SIZES | TIE | {"head_dim": 16}),
    "Arcee": ("ArceeConfig", SIZES | {"hidden_act": "gelu_new", "head_dim": 16}),
    "Apertus": ("ApertusConfig", SIZES | {"hidden_act": "relu2", "pad_token_id": 0}),
    "GPT-2": ("GPT2Config", GPT2_SIZES),
    "GPT-2, untied": ("GPT2Config", GPT2_SIZES | {"n_inner": 40, "tie_word_embeddings": False}),
}


def write_folder(folder, name):
    """What transformers writes, with random weights in which nothing is zero or one."""
    import transformers

    kind, settings = FOLDERS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(BYTE.to_json())
    return model


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Each folder is written once, for a test to copy."""

    @cache
    def write(name):
        folder = tmp_path_factory.mktemp("published")
        write_folder(folder, name)
        return folder

    return write


@pytest.fixture
def smol(published, tmp_path):
    return Path(shutil.copytree(published("SmolLM2"), tmp_path / "smol"))


def change(path, **settings):
    """Set keys of a JSON file, which need not exist."""
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | settings))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_gives_equal_logits_and_its_export_is_the_same(name, tmp_path):
    model = write_folder(tmp_path / "published", name)
    net, tokenizer = load_model(tmp_path / "published")
    assert_same_model(net, lambda tokens: model(tokens).logits)
    export(net, tokenizer, tmp_path / "out")
    weights, exported = (load_file(tmp_path / folder / "model.safetensors") for folder in ("published", "out"))
    again, _ = load_model(tmp_path / "out")
    if name == "Qwen2":  # becomes a Llama
        added = {f"model.layers.{i}.self_attn.o_proj.bias": torch.zeros(32) for i in range(2)}
        assert equal(weights | added, exported)
        assert_same_model(net, again)
        return
    assert equal(weights, exported)
    assert (again.config, again.head_config, again.vocab_size) == (net.config, net.head_config, 300)


def test_the_masks_that_old_versions_saved_with_gpt2_are_left_out(published, tmp_path):
    folder = Path(shutil.copytree(published("GPT-2"), tmp_path / "published"))
    path, mask = folder / "model.safetensors", {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}
    before, _ = load_model(folder)
    save_file(load_file(path) | mask, path, {"format": "pt"})
    assert_same_model(before, load_model(folder)[0])


def test_another_name_of_an_activation_is_of_the_same_function():
    from transformers.activations import ACT2FN

    x = torch.linspace(-5, 5, 101)
    for synonym, name in SYNONYMS.items():
        torch.testing.assert_close(ACT2FN[synonym](x), ACT2FN[name](x), rtol=0, atol=1e-5)


def test_shards_and_half_precision(tmp_path):
    model = write_folder(tmp_path, "Qwen3")
    for parameter in model.parameters():
        parameter.data = parameter.bfloat16()
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    net, _ = load_model(tmp_path)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    assert_same_model(net, lambda tokens: model.float()(tokens).logits)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


ABSENT = {"weight_map": {"a": "absent.safetensors"}}
REFUSED = [  # what is named, a folder, and what its files say instead
    *(
        (named, folder, {"config.json": changes})
        for named, folder, changes in (
            ("model_type=mistral", "SmolLM2", {"model_type": "mistral"}),
            ("use_sliding_window=True", "Qwen2", {"use_sliding_window": True}),
            ("layer_types", "Qwen3", {"layer_types": ["sliding_attention"] * 2}),
            ("rope_type=yarn", "SmolLM2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}),
            ("hidden_act=xielu", "Apertus", {"hidden_act": "xielu"}),
            ("quantization_config=", "SmolLM2", {"quantization_config": {"bits": 4}}),
            ("model.layers.0.mlp.down_proj.weight", "SmolLM2", {"intermediate_size": 49}),
            ("missing tensor lm_head.weight", "SmolLM2", {"tie_word_embeddings": False}),
            ("257 tokens, the model 200", "SmolLM2", {"vocab_size": 200}),
        )
    ),
    ("", "SmolLM2", {"model.safetensors": "x" * 100}),  # transformers says it in words of its own
    ("", "SmolLM2", {"model.safetensors": None, "model.safetensors.index.json": ABSENT}),
    ("tokenizer.json", "SmolLM2", {"tokenizer.json": "{}"}),
    ("adapter_config.json", "SmolLM2", {"adapter_config.json": {"peft_type": "LORA"}}),
]


@pytest.mark.parametrize(("named", "name", "files"), REFUSED)
def test_what_cannot_be_carried_is_refused_in_one_line(named, name, files, published, tmp_path):
    folder = Path(shutil.copytree(published(name), tmp_path / "published"))
    for filename, content in files.items():
        path = folder / filename
        if content is None:
            path.unlink()
        elif isinstance(content, str):
            path.write_text(content)
        else:
            change(path, **content)
    with refused(f"^{folder}.*{re.escape(named)}"):
        load_model(folder)


def test_no_code_of_a_folder_runs(smol):
    """Neither a class of its own, nor a kernel of the Hub, nor a pickle."""
    mark = smol / "ran"
    (smol / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    foreign = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    change(smol / "config.json", auto_map=foreign, attn_implementation="nobody/kernel")
    load_model(smol)  # as the Llama that it is
    (smol / "model.safetensors").rename(smol / "pytorch_model.bin")
    with refused(r"model\.safetensors"):
        load_model(smol)
    assert not mark.exists()


def test_a_head_that_contradicts_the_tie_is_refused(smol):
    path = smol / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})
    load_model(smol)  # a copy is none
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, path, {"format": "pt"})
    with refused("tie_word_embeddings"):
        load_model(smol)


def test_a_folder_is_converted_once_and_afterwards_needs_no_transformers(smol, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        with refused(r"needs the package transformers; type pip install -e '\.\[hf\]'"):
            load_model(smol)
    net, _ = load_model(smol)
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokens = random_tokens(2, SEQ)
    assert torch.equal(load_model(smol)[0](tokens), net(tokens))
    assert len([*(tmp_path / "cache").rglob("model.safetensors")]) == 1
    change(smol / "config.json", rms_norm_eps=1e-3)
    with refused("transformers"):
        load_model(smol)  # of other content


# --- where a text begins and ends

END = "<done>"


def test_the_end_of_text_may_have_a_name_of_its_own(smol, tmp_path):
    """tokenizer_config.json says it; saved in the own format, the name stays."""
    names = smol / "tokenizer_config.json"
    (smol / "tokenizer.json").write_text(BYTE.to_json().replace("<|endoftext|>", END))
    for content, message in (("5", "no end-of-text token"), ('{"eos_token": "<absent>"}', "<absent>")):
        names.write_text(content)
        with refused(message):
            load_model(smol)
    names.write_text(json.dumps({"eos_token": {"content": END}}))
    net, tokenizer = load_model(smol)
    assert (tokenizer.eot_token, tokenizer.eot, tokenizer.vocab_size) == (END, 0, 257)
    save_model(net, tokenizer, tmp_path / "saved")
    assert load_model(tmp_path / "saved")[1].eot_token == END


def test_a_token_that_only_transformers_adds_is_refused(smol):
    def added(content, number):
        return {"added_tokens_decoder": {str(number): {"content": content, "special": False}}}

    names = smol / "tokenizer_config.json"
    change(names, **added("<|endoftext|>", 0))
    change(smol / "special_tokens_map.json", eos_token="<|endoftext|>")
    load_model(smol)
    for path, content in (
        (names, added("<think>", 257)),
        (names, added("<|endoftext|>", 1)),
        (smol / "added_tokens.json", {"<think>": 257}),
        (names, {"additional_special_tokens": ["<|endoftext|>", "<think>"]}),
        (names, {"extra_special_tokens": {"image_token": "<image>"}}),
        (names, {"pad_token": {"content": "<pad>", "lstrip": False}}),
        (smol / "special_tokens_map.json", {"bos_token": "<s>"}),
    ):
        before = path.read_text() if path.exists() else "{}"
        change(path, **content)
        with refused(r"tokenizer\.json lacks the token '<.*save_pretrained"):
            load_model(smol)
        path.write_text(before)


def test_a_chat_model_is_read_as_a_plain_text_model(smol, tmp_path):
    """What the folder says of a chat is not carried into an export. The usual token separates documents."""
    from transformers import AutoTokenizer

    backend = tokenizers.Tokenizer.from_str(BYTE.to_json())
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(smol / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    change(smol / "tokenizer_config.json", **names)
    change(smol / "generation_config.json", eos_token_id=[258, 0])
    net, tokenizer = load_model(smol)
    assert (tokenizer.eot_token, tokenizer.begin_token, tokenizer.stops) == ("<|endoftext|>", "<|endoftext|>", {0})
    export(net, tokenizer, tmp_path / "out")
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (words.eos_token, words.chat_template) == ("<|endoftext|>", None)


# --- GGUF: our weights, our tokens and, in llama.cpp, our logits

BPE = train_bpe([Path(__file__).read_text()], 300)
TEXT = "it's 1,234  naïve\n\n\tdef f(x): <|endoftext|> 日本 🙂 "


def model(head="tied", vocab_size=BPE.vocab_size, **changes):
    return noisy(head, vocab_size, 128, **changes)


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
    with refused(r"format=gguf: needs the package gguf; type pip install -e '\.\[gguf\]'"):
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
