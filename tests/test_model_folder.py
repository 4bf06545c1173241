"""What load_model accepts, and what of a damaged or hostile folder it refuses."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import HEADS, SEQ, TEXT, as_nobody, tiny
from safetensors.torch import load_file

from lm.config import UserError
from lm.data.tokenizer import Tokenizer
from lm.data.vocabulary import byte_tokenizer, train_bpe
from lm.exchange.find_model import model_folder
from lm.exchange.portable import load_model, save_model
from lm.inference.generate import generate
from lm.model.head import UntiedMidTrainingHead
from lm.model.transformer import Transformer
from lm.system.files import read_json, write_json

BYTES = byte_tokenizer()


def net_for(head: str, tokenizer: Tokenizer, **changes: object) -> Transformer:
    net = Transformer(tiny(**changes), HEADS[head], vocab_size=tokenizer.vocab_size, seq_len=SEQ).eval()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():  # initial zeros, ones and copies would hide a swapped matrix
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return net


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    net = net_for("untied", BYTES)
    save_model(net, BYTES, tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("head", HEADS)
def test_round_trip(head: str, tmp_path: Path) -> None:
    bpe = train_bpe([TEXT], 300)
    net = net_for(head, bpe, n_kv_heads=1, qk_norm=True)
    save_model(net, bpe, tmp_path / "model")
    again, tokenizer = load_model(tmp_path)
    assert again.config == net.config
    assert again.head_config == net.head_config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), net.parameters(), strict=True))
    assert torch.equal(again(tokens := torch.arange(SEQ)[None]), net(tokens))
    assert generate(again, tokenizer, "the", 5) == generate(net, bpe, "the", 5)


def test_a_head_saved_before_untying_is_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is tied its own matrix is out of date, so the folder holds the embedding twice."""
    net, tokens = net_for("untied_midtraining", BYTES), torch.arange(SEQ)[None]
    net.head.on_train_step(0.0, net.embed.weight, {})
    trained = net(tokens)
    with monkeypatch.context() as patch:
        patch.setattr(UntiedMidTrainingHead, "before_save", lambda *_: None)
        save_model(net, BYTES, tmp_path / "not_prepared")
    save_model(net, BYTES, tmp_path / "prepared")
    assert torch.equal(load_model(tmp_path / "prepared")[0](tokens), trained)
    assert not torch.allclose(load_model(tmp_path / "not_prepared")[0](tokens), trained, atol=0.01)
    weights = load_file(tmp_path / "prepared/model.safetensors")
    assert torch.equal(weights["head.proj.weight"], weights["embed.weight"])


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_one_flipped_bit_is_detected(folder: Path, name: str) -> None:
    content = bytearray((folder / "model" / name).read_bytes())
    content[-2] ^= 1
    (folder / "model" / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: damaged"):
        load_model(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / "model" / name).unlink()
    with pytest.raises(UserError):
        load_model(folder)


def test_damaged_settings_are_refused(folder: Path) -> None:
    path = folder / "model/config.json"
    whole = json.loads(path.read_text())
    for wrong in ({**whole, "format": 99}, {}, [], "x"):
        path.write_text(json.dumps(wrong))
        with pytest.raises(UserError, match=r"config\.json"):
            load_model(folder)
    write_json(path, whole)
    load_model(folder)
    path.write_text(path.read_text()[:-3])
    with pytest.raises(UserError, match=r"config\.json"):
        load_model(folder)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("sha256", {"/dev/zero": "x"}, "sha256: names /dev/zero; expected model.safetensors and tokenizer.json"),
        ("sha256", {}, "sha256: names nothing; expected model.safetensors and tokenizer.json"),
        ("sha256", None, "sha256: expected dict, found None"),
        ("architecture", "LlamaForCausalLM", "architecture=LlamaForCausalLM: is not a setting of a model of this"),
        ("seq_len", 0, "seq_len=0: expected 1 or more"),
        ("seq_len", "9", "seq_len: expected int, found '9'"),
        ("vocab_size", 10**12, "embed.weight: model.safetensors has the shape"),
        ("document_separator", -1, "document_separator=-1: expected 0 or more"),
        ("model.linear", 5, "model.linear: expected str, found 5"),
        ("model.n_layers", 10**4, "model.n_layers=10000: model.safetensors has 19 tensors"),
        ("model.n_layers", 1, "blocks.1.attn.k_proj.weight: model.safetensors has the shape"),
        ("model.d_ff", 10**12, "model.safetensors has the shape"),
        ("model.depth", 3, "model.depth: no such key"),
        ("model.norm", "x", "model.norm=x: choose one of"),
        ("head", [], "head: expected dict, found []"),
    ],
)
def test_settings_that_fit_no_model_are_one_line(folder: Path, key: str, value: object, said: str) -> None:
    path = folder / "model/config.json"
    settings = read_json(path)
    group, _, name = key.rpartition(".")
    (settings[group] if group else settings)[name] = value
    write_json(path, settings)
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_a_class_named_by_a_file_is_imported_only_with_trust(folder: Path) -> None:
    path = folder / "model/config.json"
    settings = read_json(path)
    settings["model"]["linear"] = "antigravity.Linear"
    write_json(path, settings)
    with pytest.raises(UserError, match="trust=true"):
        load_model(folder)


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_model(tmp_path / "absent")
    with pytest.raises(UserError, match="holds no model"):
        load_model(tmp_path)


def test_a_closed_folder_is_not_empty(open_folder: Path) -> None:
    (open_folder / "model").mkdir(mode=0)
    with as_nobody(), pytest.raises(PermissionError) as caught:
        model_folder(open_folder)
    assert caught.value.filename == str(open_folder / "model/config.json")


def test_a_folder_that_may_be_entered_and_not_listed_holds_a_model(open_folder: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (open_folder / name).touch()
    open_folder.chmod(0o311)
    with as_nobody():
        assert model_folder(open_folder) == open_folder
