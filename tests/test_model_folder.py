"""What save_model writes and load_model accepts and refuses, what no export can carry, and the card of an export."""

import json
import re
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
from conftest import HEADS, SEQ, TEXT, tiny
from helpers.models import GPT2, LLAMA, QWEN3, noisy
from helpers.runs import RUN, composed
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tokenizers import normalizers

from lm.config import config_hash
from lm.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from lm.data.tokens import prepare
from lm.errors import UserError
from lm.folder import load_model, model_folder, save_model, write_weights
from lm.lab.commands.export import run as export_command
from lm.lab.formats.gguf import export_gguf
from lm.lab.formats.huggingface import export
from lm.lab.formats.page import export_page
from lm.model.transformer import Transformer
from lm.system.files import read_json
from lm.training.train import train

BYTE = byte_tokenizer()
BPE = train_bpe([TEXT], 300)
TOKENS = torch.arange(SEQ)[None]
FILES = ("model.safetensors", "tokenizer.json", "config.json")


@pytest.fixture
def folder(tmp_path):
    save_model(noisy(tiny(), "untied", 257), BYTE, tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("head", HEADS)
def test_round_trip(head, tmp_path):
    net = noisy(tiny(n_kv_heads=1, qk_norm=True, attention_bias="qkv"), head, 300)
    save_model(net, BPE, tmp_path / "model")
    again, tokenizer = load_model(tmp_path)
    assert (again.config, again.head_config) == (net.config, net.head_config)
    assert torch.equal(again(TOKENS), net(TOKENS))
    assert tokenizer.to_json() == BPE.to_json()


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_saved_before_untying_is_what_was_trained(tied, tmp_path):
    """While it is tied its own matrix is out of date, so the folder holds the embedding twice. `net` is not changed."""
    net = noisy(tiny(), "untied_midtraining", 257)
    net.head.on_train_step(0.0 if tied else 1.0, net.embed.weight, {net.head.proj.weight: {}})
    before, logits = {name: tensor.clone() for name, tensor in net.state_dict().items()}, net(TOKENS)
    save_model(net, BYTE, tmp_path / "model")
    assert torch.equal(load_model(tmp_path)[0](TOKENS), logits)
    weights = load_file(tmp_path / "model/model.safetensors")
    assert torch.equal(weights["head.proj.weight"], weights["embed.weight"]) == tied
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_tensors_of_every_kind_are_written_as_the_library_reads_them(tmp_path):
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.uint16, torch.bool)
    tensors = {f"{kind}é": (torch.arange(6).reshape(2, 3).T - 1).to(kind) for kind in kinds}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 2), "odd": torch.ones(3, dtype=torch.uint8)}
    write_weights(tmp_path / "x.safetensors", tensors)
    stored = load_file(tmp_path / "x.safetensors")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(stored[name], tensor, rtol=0, atol=0)


def with_setting(**changes):
    return lambda content: json.dumps(json.loads(content) | changes).encode()


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        *((name, lambda content: content.replace(b"1", b"2"), name) for name in FILES),
        *((name, None, name) for name in FILES[:2]),
        ("config.json", None, "model"),
        ("config.json", with_setting(format=99), "format"),
        ("config.json", with_setting(sha256={"/dev/zero": "x"}), "sha256"),
        ("config.json", with_setting(seq_len=0), "seq_len=0"),
        ("config.json", with_setting(vocab_size=10**12), "embed.weight"),
        ("config.json", with_setting(model={"n_layers": 1}), "model.safetensors"),
    ],
)
def test_a_changed_or_missing_file_is_one_line_that_names_it(name, damage, named, folder):
    path = folder / "model" / name
    content = path.read_bytes()
    path.unlink()
    if damage:
        path.write_bytes(damage(content))
    with pytest.raises(UserError, match=f"^.*{folder}.*{named}.*$"):
        load_model(folder)


def test_a_folder_of_runs_is_answered_by_the_key_that_was_typed(tmp_path):
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").touch()
    with pytest.raises(UserError, match=r"^init_from=.*did you mean init_from=.*/run\?"):
        model_folder(tmp_path, "init_from")


# --- what a format cannot carry


def changed(added=(), **parts):
    backend = tokenizers.Tokenizer.from_str(BPE.to_json())
    backend.add_tokens([*added])
    for name, part in parts.items():
        setattr(backend, name, part)
    return Tokenizer(backend)


UNCARRIED = [  # how a model is written, its settings, its tokenizer, and what is named
    (export, LLAMA | {"position": "none"}, BYTE, "model.position=none"),
    (export, QWEN3 | {"ffn": "relu2", "bias": True}, BYTE, "model.bias=true"),
    (export, GPT2 | {"ffn": "gelu", "d_head": 6}, BYTE, "model.d_head=6"),
    (export, GPT2 | {"ffn": "gelu", "qk_norm": True}, BYTE, "model.qk_norm=true"),
    (export, LLAMA | {"linear": "torch.nn.Linear"}, BYTE, "model.linear=torch.nn.Linear"),
    (export_gguf, LLAMA | {"ffn": "relu2"}, BPE, "format=gguf: model.ffn=relu2"),
    (export_gguf, QWEN3 | {"attention_bias": True}, BPE, "format=gguf: model.attention_bias=true"),
    (export_gguf, QWEN3 | {"rope_scaling": [8.0, 1.0, 4.0, 32.0]}, BPE, "format=gguf: model.rope_scaling=[8.0, 1.0,"),
    (export_gguf, LLAMA, BYTE, "format=gguf: this tokenizer"),
    (export_gguf, LLAMA, changed(added=["<t>"]), "format=gguf: this tokenizer"),
    (export_page, {"norm": "torch.nn.LayerNorm"}, BPE, "format=page: model.norm=torch.nn.LayerNorm"),
    (export_page, {}, changed(normalizer=normalizers.NFC()), "format=page: this tokenizer"),
]


@pytest.mark.parametrize(("write", "changes", "tokenizer", "named"), UNCARRIED)
def test_what_a_format_cannot_carry_is_refused_by_name(write, changes, tokenizer, named, tmp_path):
    net = Transformer(tiny(**changes), HEADS["tied"], vocab_size=tokenizer.vocab_size, seq_len=SEQ)
    with pytest.raises(UserError, match=f"^{re.escape(named)}"):
        write(net, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("write", "dtype"), [(export_gguf, "f16"), (export_gguf, "q8_0"), (export_page, "f16")])
def test_a_weight_that_becomes_infinite_is_refused(write, dtype, tmp_path):
    net = noisy(tiny(**LLAMA), "tied", BPE.vocab_size)
    net.embed.weight.data[5, 3] = 1e7
    with pytest.raises(UserError, match=f"^dtype={dtype}: "):
        write(net, BPE, tmp_path / "out", dtype)
    assert not (tmp_path / "out").exists()


def test_the_command_writes_a_file_of_llama_cpp_and_says_which(command, tmp_path):
    save_model(noisy(tiny(**LLAMA), "tied", BPE.vocab_size), BPE, tmp_path / "model")
    words = (f"run_dir={tmp_path}/model", f"output_dir={tmp_path}/out", "format=gguf", "dtype=q8_0")
    code, out, err = command("export", *words)
    assert (code, err, out.split(":")[0]) == (0, "", f"{tmp_path}/out/model.gguf")


@pytest.mark.parametrize("form", ["safetensors", "gguf", "page"])
def test_a_model_that_diverged_is_not_exported(form, command, tmp_path):
    net = noisy(tiny(**LLAMA), "tied", BPE.vocab_size)
    net.norm.weight.data[3] = torch.nan
    save_model(net, BPE, tmp_path / "model")
    code, _, err = command("export", f"run_dir={tmp_path}/model", f"output_dir={tmp_path}/out", f"format={form}")
    assert (code, (tmp_path / "out").exists()) == (2, False)
    assert "norm.weight: has numbers that are not finite" in err


# --- the card, read back by huggingface_hub, and its example, which runs


def card(run_dir, output_dir):
    export_command([f"run_dir={run_dir}", f"output_dir={output_dir}"])
    return Path(output_dir, "README.md").read_text()


def hash_by_words(text):
    """The hash of the run that the words of a card give to train."""
    (block,) = re.findall(r"trains the same run.*?\n((?:\n|    .*\n)+)", text)
    run = composed(*map(str.strip, block.strip().splitlines()))
    data = prepare(run.data, run.tokenizer)
    return config_hash(run, data.hash, data.tokenizer.hash)


def test_the_card_of_a_run(finished_run, text_file, tmp_path, monkeypatch, capsys):
    """Of a run on a text whose name is Markdown and HTML; of what has no result or no settings it says less."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_run, "run")
    shutil.copy(text_file, "a_*text*<b>|.txt")
    config = Path("run/config.yaml")
    config.write_text(config.read_text().replace("text.txt", "a_*text*<b>|.txt"))
    result = read_json(Path("run/result.json"))
    text = card("run", "out")
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "text-generation", None)
    assert f"{result['val_bpb']:.4f} bits per byte, {result['val_loss']:.4f} nats per token" in text
    assert f"{result['n_params']:,} parameters" in text
    assert hash_by_words(text) == result["config_hash"]
    assert str(text_file.parent) not in text, "the folders of this machine are nobody's business"
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    capsys.readouterr()
    exec(example, {})
    assert capsys.readouterr().out.startswith("Once")

    Path("run/result.json").unlink()
    unfinished = card("run", "unfinished")
    assert "\n    model.d_model=32\n" in unfinished
    assert "bits per byte" not in unfinished
    config.unlink()
    assert "model.d_model=32" not in card("run", "bare")


@pytest.mark.slow
def test_the_words_of_a_card_name_the_start(finished_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_run, "base")
    Path("a text (1).txt").write_text(TEXT)
    words = [f"init_from={tmp_path}/base", "model.linear=lora", "optim=adamw", "trainer.max_steps=2", "run_dir=tuned"]
    _, result = train(composed(*RUN, *words, f"data.path={tmp_path}/a text (1).txt"))
    text = card("tuned", "out")
    assert hash_by_words(text) == result["config_hash"]
    assert str(tmp_path) not in text
