"""What save_model writes and load_model accepts and refuses, what no export can carry, and the card of an export."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from conftest import HEADS, SEQ, TEXT, TINY_RUN, Outcome, as_nobody, tiny
from helpers.models import noisy
from helpers.runs import RUN, composed
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tokenizers import AddedToken, normalizers

from lm.config import config_hash
from lm.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from lm.data.tokens import prepare
from lm.decoding import generate
from lm.errors import UserError
from lm.folder import load_model, model_folder, save_model, write_weights
from lm.lab.commands import export
from lm.model.transformer import Transformer
from lm.system.files import read_json, write_json
from lm.training.train import train

BYTE = byte_tokenizer()
BPE = train_bpe([TEXT], 300)
TOKENS = torch.arange(SEQ)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(noisy(tiny(), "untied", 257), BYTE, tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("head", HEADS)
def test_round_trip(head: str, tmp_path: Path) -> None:
    net = noisy(tiny(n_kv_heads=1, qk_norm=True, attention_bias="qkv"), head, 300)
    save_model(net, BPE, tmp_path / "model")
    again, tokenizer = load_model(tmp_path)
    assert (again.config, again.head_config) == (net.config, net.head_config)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), net.parameters(), strict=True))
    assert torch.equal(again(TOKENS), net(TOKENS))
    assert generate(again, tokenizer, "the", 5) == generate(net, BPE, "the", 5)


def test_a_model_has_the_precision_of_its_file_whatever_the_default_is(folder: Path) -> None:
    expected = load_model(folder)[0](TOKENS)
    torch.set_default_dtype(torch.bfloat16)
    try:
        net, _ = load_model(folder)
        logits = net(TOKENS)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_saved_before_untying_is_what_was_trained(tied: bool, tmp_path: Path) -> None:
    """While it is tied its own matrix is out of date, so the folder holds the embedding twice. `net` is not changed."""
    net = noisy(tiny(), "untied_midtraining", 257)
    net.head.on_train_step(0.0 if tied else 1.0, net.embed.weight, {net.head.proj.weight: {}})
    before, logits = {name: tensor.clone() for name, tensor in net.state_dict().items()}, net(TOKENS)
    save_model(net, BYTE, tmp_path / "model")
    assert torch.equal(load_model(tmp_path)[0](TOKENS), logits)
    weights = load_file(tmp_path / "model/model.safetensors")
    assert torch.equal(weights["head.proj.weight"], weights["embed.weight"]) == tied
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_tensors_of_every_kind_are_written_as_the_library_reads_them(tmp_path: Path) -> None:
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
    integers = (torch.int64, torch.int8, torch.uint16)
    tensors = {f"{kind}é": (torch.arange(6).reshape(2, 3).T - 1).to(kind) for kind in (*floats, *integers, torch.bool)}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 2), "odd": torch.ones(3, dtype=torch.uint8)}
    write_weights(tmp_path / "x.safetensors", tensors)
    stored = load_file(tmp_path / "x.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {name: t.dtype for name, t in tensors.items()}
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_another_or_a_missing_file_is_named(folder: Path, name: str) -> None:
    path = folder / "model" / name
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    with pytest.raises(UserError, match=rf"{folder}.*{name}"):
        load_model(folder)
    path.unlink()
    with pytest.raises(UserError, match=f"{folder}.*{name}" if name != "config.json" else str(folder)):
        load_model(folder)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("format", 99, "format"),
        ("sha256", {"/dev/zero": "x"}, "sha256"),
        ("seq_len", 0, "seq_len=0"),
        ("vocab_size", 10**12, "embed.weight"),
        ("model.linear", "antigravity.Linear", "classes=[antigravity.Linear]"),
        ("model.n_layers", 1, "blocks.1.attn.k_proj.weight"),
        ("model.depth", 3, "model.depth"),
    ],
)
def test_settings_that_fit_no_model_are_one_line(folder: Path, key: str, value: object, named: str) -> None:
    path = folder / "model/config.json"
    settings = read_json(path)
    group, _, name = key.rpartition(".")
    (settings[group] if group else settings)[name] = value
    write_json(path, settings)
    with pytest.raises(UserError) as caught:
        load_model(folder)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_closed_folder_is_not_taken_for_an_empty_one(open_folder: Path) -> None:
    (open_folder / "model").mkdir(mode=0)
    with as_nobody(), pytest.raises(PermissionError) as caught:
        model_folder(open_folder)
    assert caught.value.filename == str(open_folder / "model/config.json")


# --- what a format cannot carry


def changed(*added: str | AddedToken, **parts: Any) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(BPE.to_json())
    backend.add_tokens([*added])
    for name, part in parts.items():
        setattr(backend, name, part)
    return Tokenizer(backend)


GPT2, LLAMA = {"norm": "layernorm", "position": "learned"}, {"norm": "rmsnorm", "position": "rope", "ffn": "swiglu"}
ROPE = {"rope_scaling": [8.0, 1.0, 4.0, 32.0]}
UNCARRIED: list[tuple[str, dict[str, Any], Tokenizer, str]] = [  # words of the command, a model, and what is named
    *(
        ("", changes, BYTE, key)
        for changes, key in (
            (LLAMA | {"position": "none"}, "model.position=none"),
            (LLAMA | {"ffn": "relu2", "qk_norm": True, "bias": True}, "model.bias=true"),
            (LLAMA | {"norm": "layernorm"}, "model.norm=layernorm"),
            (LLAMA | {"norm": "none"}, "model.norm=none"),
            (GPT2 | {"ffn": "gelu", "norm_order": "post"}, "model.norm_order=post"),
            (LLAMA | {"ffn": "relu2", "attention_bias": "qkv"}, "model.attention_bias=qkv"),
            (GPT2 | {"ffn": "swiglu"}, "model.ffn=swiglu"),
            (GPT2 | {"ffn": "gelu", "qk_norm": True}, "model.qk_norm=true"),
            (LLAMA | {"linear": "torch.nn.Linear"}, "model.linear=torch.nn.Linear"),
        )
    ),
    *(
        ("format=gguf", LLAMA | changes, tokenizer, f"format=gguf: {key}")
        for changes, tokenizer, key in (
            ({"ffn": "relu2"}, BPE, "model.ffn=relu2"),
            ({"norm": "none"}, BPE, "model.norm=none"),
            ({"norm_order": "post"}, BPE, "model.norm_order=post"),
            (GPT2 | {"ffn": "gelu"}, BPE, "model.position=learned"),
            ({"attention_bias": "qkv"}, BPE, "model.attention_bias=qkv"),
            ({"qk_norm": True, "attention_bias": True}, BPE, "model.attention_bias=true"),
            ({"qk_norm": True, **ROPE}, BPE, "model.rope_scaling=[8.0, 1.0, 4.0, 32.0]"),
            ({}, BYTE, "this tokenizer"),
            ({}, changed("<t>"), "this tokenizer"),
        )
    ),
    ("format=gguf title=Mine", {}, BPE, "title=Mine"),
    ("format=page dtype=q8_0", {}, BPE, "dtype=q8_0"),
    ("format=page", {"norm": "torch.nn.LayerNorm"}, BPE, "format=page: model.norm=torch.nn.LayerNorm"),
    ("format=page", {"linear": "torch.nn.Linear"}, BPE, "format=page: model.linear=torch.nn.Linear"),
    ("format=page", {"linear": "lora"}, BPE, "format=page: model.linear=lora"),
    ("format=page", {}, changed(normalizer=normalizers.NFC()), "format=page: this tokenizer"),
]


def refused(command: Callable[..., Outcome], net: Transformer, tokenizer: Tokenizer, folder: Path, words: str) -> str:
    """The line that the command says about an export, of which nothing is left."""
    save_model(net, tokenizer, folder / "model")
    words = f"run_dir={folder}/model output_dir={folder}/out classes=[torch.nn.LayerNorm,torch.nn.Linear] {words}"
    code, _, error = command("export", *words.split())
    assert (code, error.count("\n"), (folder / "out").exists()) == (2, 1, False)
    return error


@pytest.mark.parametrize(("words", "changes", "tokenizer", "key"), UNCARRIED)
def test_what_a_format_cannot_carry_is_refused_by_name(
    words: str, changes: dict[str, Any], tokenizer: Tokenizer, key: str, command: Callable[..., Outcome], tmp_path: Path
) -> None:
    net = Transformer(tiny(**changes), HEADS["tied"], vocab_size=tokenizer.vocab_size, seq_len=SEQ)
    assert refused(command, net, tokenizer, tmp_path, words).startswith(f"error: {key}")


@pytest.mark.parametrize("words", ["format=gguf dtype=f16", "format=gguf dtype=q8_0", "format=page dtype=f16"])
def test_a_weight_that_becomes_infinite_is_refused(words: str, command: Callable[..., Outcome], tmp_path: Path) -> None:
    net = noisy(tiny(**LLAMA), "tied", BPE.vocab_size)
    net.embed.weight.data[5, 3] = 1e7
    assert refused(command, net, BPE, tmp_path, words).startswith(f"error: {words.split()[1]}: ")


# --- the card, read back by huggingface_hub, and its example, which runs


def exported(run_dir: str, output_dir: str) -> str:
    export.run([f"run_dir={run_dir}", f"output_dir={output_dir}"])
    return Path(output_dir, "README.md").read_text()


def test_the_card_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run on a text whose name is Markdown and HTML; of what has no result or no settings it says less."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a_*text*<b>|.txt"
    path.write_text(TEXT)
    run = train(composed(*TINY_RUN, "run_dir=run", f"data.path={path}"))[1]
    text = exported("run", "out")
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "text-generation", None)
    assert f"{run['val_bpb']:.4f} bits per byte, {run['val_loss']:.4f} nats per token" in text
    assert f"{run['n_params']:,} parameters" in text
    assert "\nmodel.d_model=32\n" in text
    assert str(tmp_path) not in text, "the folders of this machine are nobody's business"
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    capsys.readouterr()
    exec(example, {})
    assert capsys.readouterr().out.startswith("Once")

    Path("run/result.json").unlink()
    unfinished = exported("run", "unfinished")
    assert "\nmodel.d_model=32\n" in unfinished
    assert "bits per byte" not in unfinished
    assert "model.d_model=32" not in exported("out", "again")


@pytest.mark.slow
def test_the_words_of_a_card_give_its_run_and_it_names_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a text (1).txt").write_text(TEXT)
    (tmp_path / "own.json").write_text(BPE.to_json())
    short = ["trainer.max_steps=2", f"data.path={tmp_path}/a text (1).txt"]
    asked = ["trainer=auto", "max_tokens=999", "loss=auto", "model.d_head=8", "data.val_fraction=0.2"]
    runs = {
        "base": [*TINY_RUN, *short, "head=untied", "checkpoint.best=true", "validation.every=1"],
        "asked": [*TINY_RUN, *short, *asked, "tokenizer=file", f"tokenizer.path={tmp_path}/own.json"],
        "tuned": [*RUN, *short, f"init_from={tmp_path}/base", "model.linear=lora", "optim=adamw"],
    }
    for name, words in runs.items():
        result = train(composed(*words, f"run_dir={name}"))[1]
        text = exported(name, f"{name}-out")
        (block,) = re.findall(r"trains the same run.*?```\n(.*?)```", text, re.DOTALL)
        run = composed(*block.splitlines())
        data = prepare(run.data, run.tokenizer)
        assert config_hash(run, data.hash, data.tokenizer.hash) == result["config_hash"], name
        assert str(tmp_path) not in text
    assert f"starting from the weights of `base ({result['init_from']['sha256'][:16]})`" in text


def test_a_folder_of_runs_is_answered_by_the_key_that_was_typed(tmp_path: Path) -> None:
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").touch()
    with pytest.raises(UserError, match=r"^init_from=.*did you mean init_from=.*/run\?"):
        model_folder(tmp_path, "init_from")
