"""A run that starts from a finished one: its settings, identity, first loss and resume, and what is refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import TEXT
from safetensors.torch import load_file

from lm import load_model
from lm.config import EvaluateConfig, HeadConfig, ModelConfig, RunConfig, UserError
from lm.config.identity import config_hash
from lm.data.batches import TrainingStream
from lm.data.tokens import prepare
from lm.formats.base import read_base
from lm.formats.folder import save_model
from lm.inference.evaluate import evaluate_run
from lm.model.init import named_seed
from lm.training.train import train
from tests.helpers import runs
from tests.helpers.runs import CLOCK, result, rows
from tests.helpers.words import MODEL, RUN

STILL = ["optim.lr=0", "optim.adam_lr=0"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and finished runs on it: tied, and untied with learned positions."""
    home = tmp_path_factory.mktemp("home")
    (home / "text").write_text(TEXT)
    train(composed(home, *MODEL, "tokenizer=char", f"run_dir={home / 'tied'}"))
    learned = ["head=untied", "model.position=learned", "model.previous_token_init=0", "tokenizer=byte"]
    train(composed(home, *MODEL, *learned, f"run_dir={home / 'untied'}"))
    return home


def composed(home: Path, *overrides: str) -> RunConfig:
    return runs.composed(*RUN, f"data.path={home / 'text'}", f"data.cache_dir={home / 'cache'}", *overrides)


def start(home: Path, base: str, *overrides: str) -> RunConfig:
    return composed(home, f"init_from={home / base}", *overrides)


# --- settings


def test_model_head_and_tokenizer_are_those_of_the_loaded_run(home: Path) -> None:
    run, base = start(home, "untied"), composed(home, *MODEL)
    assert run.model == replace(base.model, position="learned", previous_token_init=0)
    assert (run.head.name, run.head.head_lr_multiplier) == ("untied", 4.0)
    assert (run.tokenizer.kind, run.tokenizer.path) == ("file", str(home / "untied/model/tokenizer.json"))
    assert run.init_sha256 == read_base(str(home / "untied")).sha256
    own = {"model": base.model, "head": base.head, "tokenizer": base.tokenizer}
    assert replace(run, init_from=None, init_sha256=None, **own) == base
    chosen = start(home, "untied", "head=untied_from_embedding").head
    assert chosen == composed(home, "head=untied_from_embedding").head
    adjusted = start(home, "untied", "head.head_lr_multiplier=2").head
    assert adjusted == replace(run.head, head_lr_multiplier=2.0)


def test_what_agrees_with_the_loaded_run_may_be_typed_again(home: Path) -> None:
    run = start(home, "tied", *MODEL, "model=small", "tokenizer=char", "experiment=chars", "data.seq_len=32")
    assert replace(run.model, dropout=0.0) == start(home, "tied").model
    assert run.model.dropout == 0.1  # of the experiment: weights do not depend on it


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.n_layers=4"], "model.n_layers=4"),  # the default
        (["model.n_kv_heads=2"], "model.n_kv_heads=2"),
        (["model=medium"], "model.n_layers=6"),
        (["experiment=shakespeare_char", "tokenizer=char"], "model.n_layers=3"),
        (["model.rope_theta=100"], "model.rope_theta=100.0"),
        (["tokenizer=bpe"], "tokenizer.kind=bpe"),
        (["tokenizer.vocab_size=2048"], "tokenizer.vocab_size=2048"),
        (["tokenizer=file", "tokenizer.path=/absent"], "tokenizer.path=/absent"),
        (["init_sha256=00"], "init_sha256=00"),
        (["init_tied_matrix=first"], "init_tied_matrix=first"),
    ],
)
def test_what_contradicts_the_loaded_run_is_refused_by_key(home: Path, overrides: list[str], key: str) -> None:
    with pytest.raises(UserError) as caught:
        start(home, "tied", *overrides)
    assert str(caught.value).startswith(f"{key}: ")


@pytest.mark.parametrize("name", ["linear", "norm", "ffn", "position"])
def test_a_class_is_imported_by_consent_alone(home: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(home / "tied", tmp_path / "r")
    net, tokenizer = load_model(home / "tied")
    net.config = replace(net.config, **{name: "mine.Part", "previous_token_init": 0})
    save_model(net, tokenizer, tmp_path / "r/model")
    with pytest.raises(UserError, match=f"add model.{name}=mine.Part"):
        composed(home, f"init_from={tmp_path / 'r'}")
    allowed = composed(home, f"init_from={tmp_path / 'r'}", f"model.{name}=mine.Part")
    assert getattr(allowed.model, name) == "mine.Part"


def test_a_moved_run_is_the_same_and_other_weights_are_another(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "tied", tmp_path / "moved")
    same = {config_hash(composed(home, f"init_from={path}")) for path in (home / "tied", tmp_path / "moved")}
    run = start(home, "tied")
    others = {
        *(config_hash(replace(run, **change)) for change in ({"init_sha256": "00"}, {"init_tied_matrix": "mean"})),
        config_hash(composed(home, *MODEL, "tokenizer=char")),
    }
    assert (len(same), len(others), same & others) == (1, 3, set())


# --- training


@pytest.mark.parametrize("head", ["tied", "untied_from_embedding"])
def test_the_first_loss_is_the_loaded_models(home: Path, tmp_path: Path, head: str) -> None:
    """With all validation batches, to the last bit; and with a learning rate of zero the weights stay."""
    run = start(home, "tied", f"head={head}", *STILL, f"run_dir={tmp_path / 'r'}")
    (folder, scores), base = train(run), result(home / "tied")
    record = scores["init_from"]
    assert record["val_loss"] == base["val_loss"] == scores["val_loss"]
    assert record.get("val_loss_before_conversion", base["val_loss"]) == base["val_loss"]
    assert (record["path"], record["sha256"]) == (str(home / "tied"), run.init_sha256)
    assert (record["head"], record["steps"], record["tokens"]) == ("tied", 12, 12 * 128)
    assert (scores["tokenizer_hash"], base["init_from"]) == (base["tokenizer_hash"], None)
    old, new = (load_file(path / "model/model.safetensors") for path in (home / "tied", folder))
    assert all(torch.equal(new[key], old[key]) for key in old)
    first = float(rows(folder)[0]["train/loss"])
    continued, again = (loss_of_first_batch(home, run, seed) for seed in (named_seed(0, "continued"), 0))
    assert first == pytest.approx(continued, abs=1e-5)  # the first batch is not the loaded run's first one
    assert abs(first - again) > 1e-3


@torch.no_grad()
def loss_of_first_batch(home: Path, run: RunConfig, seed: int) -> float:
    net, _ = load_model(home / "tied")
    stream = TrainingStream(prepare(run.data, run.tokenizer).train, seq_len=32, batch_size=4, seed=seed)
    tokens, targets = stream.batch(0)
    return float(F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()))


def test_tying_needs_a_rule_and_reports_both_losses(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="init_tied_matrix"):
        train(start(home, "untied", "head=tied", f"run_dir={tmp_path / 'r'}"))
    assert not (tmp_path / "r").exists()
    _, scores = train(start(home, "untied", "head=tied", "init_tied_matrix=mean", f"run_dir={tmp_path / 'r'}"))
    record = scores["init_from"]
    assert record["val_loss_before_conversion"] == result(home / "untied")["val_loss"]
    assert record["val_loss"] > record["val_loss_before_conversion"] + 0.01


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers with tied embeddings and random weights, and our text beside it."""
    transformers = pytest.importorskip("transformers")
    from lm.data.vocabulary import byte_tokenizer

    folder = tmp_path_factory.mktemp("pretrained")
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=0))
    model.save_pretrained(folder / "base")
    (folder / "base/tokenizer.json").write_text(byte_tokenizer().to_json())
    (folder / "text").write_text(TEXT)
    return folder


def test_a_pretrained_model_is_continued_with_either_head(pretrained: Path, tmp_path: Path) -> None:
    """At a learning rate of zero nothing changes: a head of its own starts as a copy of the tied matrix."""
    loaded = load_file(pretrained / "base/model.safetensors")["model.embed_tokens.weight"]
    losses = set()
    for head in ("tied", "untied_from_embedding"):
        words = [*STILL, "trainer.max_steps=1", f"head={head}", f"run_dir={tmp_path / head}"]
        folder, scores = train(start(pretrained, "base", *words))
        losses.add(scores["val_loss"])
        weights = load_file(folder / "model/model.safetensors")
        matrices = {name for name, tensor in weights.items() if torch.equal(tensor, loaded)}
        assert matrices == {"embed.weight"} | ({"head.proj.weight"} if head != "tied" else set())
    assert len(losses) == 1


def test_tokens_add_up_over_a_chain_of_runs(home: Path, tmp_path: Path) -> None:
    train(start(home, "tied", f"run_dir={tmp_path / 'a'}"))
    base = read_base(str(tmp_path / "a/model"))
    assert (base.steps, base.tokens, base.typed) == (24, 24 * 128, {"kind": "char", "vocab_size": None})


# --- resume


@pytest.fixture
def interrupted(home: Path, tmp_path: Path) -> Path:
    """A run as it is when it was killed after step 8, and beside it the undisturbed one; the loaded run is a copy."""
    shutil.copytree(home / "tied", tmp_path / "base")
    train(composed(home, f"init_from={tmp_path / 'base'}", f"run_dir={tmp_path / 'whole'}"))
    shutil.copytree(tmp_path / "whole", tmp_path / "r")
    (tmp_path / "r/result.json").unlink()
    (tmp_path / "r/checkpoints/step-00000012.ckpt").unlink()
    return tmp_path / "r"


def test_a_resume_does_not_need_the_loaded_run(interrupted: Path) -> None:
    whole = interrupted.parent / "whole"
    shutil.rmtree(interrupted.parent / "base")
    _, scores = train(runs.composed(f"run_dir={interrupted}"))
    assert scores["resumed_from"] == [8]
    keys = result(whole).keys() - {*CLOCK}
    assert {key: scores[key] for key in keys} == {key: result(whole)[key] for key in keys}
    for run_dir in (interrupted, whole):  # and neither does scoring
        assert evaluate_run(EvaluateConfig(run_dir=str(run_dir), threads=1))["loss"] == scores["val_loss"]


def test_without_a_checkpoint_the_same_weights_are_needed(interrupted: Path, home: Path) -> None:
    base = interrupted.parent / "base"
    shutil.rmtree(interrupted / "checkpoints")
    shutil.rmtree(base)
    with pytest.raises(UserError, match=f"^init_from={base}: "):
        train(runs.composed(f"run_dir={interrupted}"))
    shutil.copytree(home / "untied", base)
    with pytest.raises(UserError, match=f"^init_from={base}: .*hash"):
        train(runs.composed(f"run_dir={interrupted}"))
    _, scores = train(runs.composed(f"run_dir={interrupted}", f"init_from={home / 'tied'}"))
    assert scores["val_loss"] == result(interrupted.parent / "whole")["val_loss"]


def test_another_loaded_run_is_another_run(interrupted: Path, home: Path) -> None:
    with pytest.raises(UserError, match="init_sha256 is"):
        train(composed(home, f"init_from={home / 'untied'}", f"run_dir={interrupted}"))


# --- bad input


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9] + b"[" * 9)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("", remove, "model"),
        ("config.json", remove, "model"),
        ("tokenizer.json", remove, "tokenizer.json"),
        ("model.safetensors", remove, "model.safetensors"),
        *((name, spoil, name) for name in ("config.json", "tokenizer.json", "model.safetensors")),
    ],
)
def test_what_is_missing_or_damaged_is_named(
    name: str, damage: Callable[[Path], None], named: str, home: Path, tmp_path: Path
) -> None:
    shutil.copytree(home / "tied", tmp_path / "r")
    damage(tmp_path / "r/model" / name)
    with pytest.raises(UserError, match=f"{tmp_path / 'r'}.*{named}"):
        train(composed(home, f"init_from={tmp_path / 'r'}", f"run_dir={tmp_path / 'new'}"))
    assert not (tmp_path / "new").exists()


def test_weights_that_give_no_loss_are_refused(home: Path, tmp_path: Path) -> None:
    net, tokenizer = load_model(home / "tied")
    with torch.no_grad():
        net.norm.weight.fill_(torch.nan)
    save_model(net, tokenizer, tmp_path / "model")
    with pytest.raises(UserError, match=f"^init_from={tmp_path}: .*nan"):
        train(composed(home, f"init_from={tmp_path}", f"run_dir={tmp_path / 'r'}"))
    assert not (tmp_path / "r").exists()


def test_what_the_loaded_model_cannot_do_is_named(home: Path, tmp_path: Path) -> None:
    new = f"run_dir={tmp_path / 'new'}"
    (tmp_path / "other").write_text("é" * 2000)
    refused: list[tuple[RunConfig, str]] = [
        (start(home, "untied", "data.seq_len=64", new), r"^data\.seq_len=64: "),
        (start(home, "tied", f"data.path={tmp_path / 'other'}", new), "'é'"),
        (composed(home, "init_tied_matrix=mean", new), "^init_tied_matrix=mean: "),
    ]
    run = start(home, "tied", new)  # in Python
    refused.append((replace(run, model=ModelConfig()), r"^model\.n_layers=4: init_from="))
    refused.append((replace(run, tokenizer=start(home, "untied").tokenizer), "^tokenizer: init_from="))
    for wrong, message in refused:
        with pytest.raises(UserError, match=message):
            train(wrong)
        assert not (tmp_path / "new").exists()
    _, scores = train(replace(run, head=HeadConfig(), init_sha256=None))
    pinned = replace(run, head=HeadConfig())
    assert scores["config_hash"] == config_hash(pinned, scores["data_hash"], scores["tokenizer_hash"])
    assert json.loads((tmp_path / "new/result.json").read_text()) == scores
