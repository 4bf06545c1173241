"""A run that starts from a finished one: its settings, identity, first loss and resume, and what is refused."""

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
from lm.config import ModelConfig, RunConfig, UserError
from lm.config.identity import config_hash
from lm.data.batches import TrainingStream
from lm.data.tokens import prepare
from lm.formats.base import read_base
from lm.formats.folder import save_model
from lm.model.init import named_seed
from lm.training.train import train
from tests.helpers import runs
from tests.helpers.runs import result, rows
from tests.helpers.words import MODEL, RUN

STILL = ["optim.lr=0", "optim.adam_lr=0"]
each = pytest.mark.parametrize


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


@pytest.mark.slow
def test_model_head_and_tokenizer_are_those_of_the_loaded_run(home: Path) -> None:
    run, base = start(home, "untied"), composed(home, *MODEL)
    assert run.model == replace(base.model, position="learned", previous_token_init=0)
    assert (run.head.name, run.head.head_lr_multiplier) == ("untied", 4.0)
    assert (run.tokenizer.kind, run.tokenizer.path) == ("file", str(home / "untied/model/tokenizer.json"))
    assert run.init_sha256 == read_base(str(home / "untied")).sha256
    chosen = start(home, "untied", "head=untied_from_embedding").head
    assert chosen == composed(home, "head=untied_from_embedding").head
    adjusted = start(home, "untied", "head.head_lr_multiplier=2").head
    assert adjusted == replace(run.head, head_lr_multiplier=2.0)


@pytest.mark.slow
@each(
    ("overrides", "key"),
    [
        (["model.n_layers=4"], "model.n_layers=4"),  # the default
        (["experiment=shakespeare_char", "tokenizer=char"], "model.n_layers=3"),
        (["model.rope_theta=100"], "model.rope_theta=100.0"),
        (["tokenizer=bpe"], "tokenizer.kind=bpe"),
        (["tokenizer=file", "tokenizer.path=/absent"], "tokenizer.path=/absent"),
        (["init_sha256=00"], "init_sha256=00"),
        (["init_tied_matrix=first"], "init_tied_matrix=first"),
    ],
)
def test_what_contradicts_the_loaded_run_is_refused_by_key(home: Path, overrides: list[str], key: str) -> None:
    with pytest.raises(UserError, match=f"^{key}: "):
        start(home, "tied", *overrides)


@each("name", ["linear", "position"])
def test_a_class_is_imported_by_consent_alone(home: Path, tmp_path: Path, name: str) -> None:
    net, tokenizer = load_model(home / "tied")
    net.config = replace(net.config, **{name: "mine.Part", "previous_token_init": 0})
    shutil.copytree(home / "tied", tmp_path / "r")
    save_model(net, tokenizer, tmp_path / "r/model")
    with pytest.raises(UserError, match=f"add model.{name}=mine.Part"):
        composed(home, f"init_from={tmp_path / 'r'}")
    allowed = composed(home, f"init_from={tmp_path / 'r'}", f"model.{name}=mine.Part")
    assert getattr(allowed.model, name) == "mine.Part"


@pytest.mark.slow
def test_a_moved_run_is_the_same_and_other_weights_are_another(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "tied", tmp_path / "moved")
    same = {config_hash(composed(home, f"init_from={path}")) for path in (home / "tied", tmp_path / "moved")}
    run = start(home, "tied")
    changed = (replace(run, init_sha256="00"), replace(run, init_tied_matrix="mean"), composed(home, *MODEL))
    others = set(map(config_hash, changed))
    assert (len(same), len(others), same & others) == (1, 3, set())


# --- training


@each("head", ["tied", "untied_from_embedding"])
def test_the_first_loss_is_the_loaded_models(home: Path, tmp_path: Path, head: str) -> None:
    """With all validation batches, to the last bit; and with a learning rate of zero the weights stay."""
    run = start(home, "tied", f"head={head}", *STILL, f"run_dir={tmp_path / 'r'}")
    (folder, scores), base = train(run), result(home / "tied")
    record = scores["init_from"]
    assert record["val_loss"] == base["val_loss"] == scores["val_loss"]
    assert (record["path"], record["sha256"]) == (str(home / "tied"), run.init_sha256)
    assert (record["head"], record["steps"], record["tokens"]) == ("tied", 12, 12 * 128)
    chain = read_base(str(folder / "model"))
    assert (chain.steps, chain.tokens, chain.typed) == (24, 24 * 128, {"kind": "char", "vocab_size": None})
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


@pytest.mark.slow
def test_tying_needs_a_rule_and_reports_both_losses(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="init_tied_matrix"):
        train(start(home, "untied", "head=tied", f"run_dir={tmp_path / 'r'}"))
    assert not (tmp_path / "r").exists()
    _, scores = train(start(home, "untied", "head=tied", "init_tied_matrix=mean", f"run_dir={tmp_path / 'r'}"))
    record = scores["init_from"]
    assert record["val_loss_before_conversion"] == result(home / "untied")["val_loss"]
    assert record["val_loss"] > record["val_loss_before_conversion"] + 0.01


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


@pytest.mark.slow
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


# --- bad input


def give_no_loss(path: Path) -> None:
    net, tokenizer = load_model(path.parent)
    with torch.no_grad():
        net.norm.weight.fill_(torch.nan)
    save_model(net, tokenizer, path.parent)


@each("damage", [Path.unlink, give_no_loss])
def test_weights_that_are_missing_or_give_no_loss_are_named(
    damage: Callable[[Path], None], home: Path, tmp_path: Path
) -> None:
    shutil.copytree(home / "tied/model", tmp_path / "model")
    damage(tmp_path / "model/model.safetensors")
    with pytest.raises(UserError, match=str(tmp_path)):
        train(composed(home, f"init_from={tmp_path}", f"run_dir={tmp_path / 'new'}"))
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_what_the_loaded_model_cannot_do_is_named(home: Path, tmp_path: Path) -> None:
    new = [f"run_dir={tmp_path / 'new'}"]
    (tmp_path / "other").write_text("é" * 2000)
    tied = start(home, "tied", *new)
    refused = [
        (start(home, "untied", "data.seq_len=64", *new), r"^data\.seq_len=64: "),
        (start(home, "tied", f"data.path={tmp_path / 'other'}", *new), "'é'"),
        (composed(home, "init_tied_matrix=mean", *new), "^init_tied_matrix=mean: "),
        (replace(tied, model=ModelConfig()), r"^model\.n_layers=4: init_from="),  # in Python
        (replace(tied, tokenizer=start(home, "untied").tokenizer), "^tokenizer: init_from="),
    ]
    for wrong, message in refused:
        with pytest.raises(UserError, match=message):
            train(wrong)
        assert not (tmp_path / "new").exists()
