"""A run that starts from a finished one: its settings, identity, first loss and resume, and what is refused."""

import csv
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TEXT, Script
from helpers.words import CLOCK, MODEL, RUN
from hydra import initialize_config_dir
from safetensors.torch import load_file
from test_pretrained import FOLDERS, write_folder

from lm.cli.compose import compose
from lm.cli.mistakes import CONFIGS
from lm.config import BadInput, EvaluateConfig, HeadConfig, ModelConfig, RunConfig
from lm.config.identity import config_hash
from lm.data.batches import TrainingStream
from lm.data.tokens import prepare
from lm.exchange.base import kind_of, read_base
from lm.exchange.portable import load_model, save_model
from lm.inference.evaluate import evaluate_run
from lm.model.init import named_seed
from lm.system.files import read_sealed, write_sealed
from lm.training.train import train

each = pytest.mark.parametrize


@pytest.fixture(autouse=True, scope="module")
def composing() -> Iterator[None]:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and finished runs on it: tied, and untied with learned positions."""
    home = tmp_path_factory.mktemp("home")
    (home / "text").write_text(TEXT)
    train(composed(home, *MODEL, "tokenizer=char", f"run_dir={home / 'tied'}"))
    learned = ["head=untied", "model.position=learned", "model.previous_token_init=0", "tokenizer=byte"]
    train(composed(home, *MODEL, *learned, f"run_dir={home / 'untied'}"))
    return home


def composed(home: Path, *words: str) -> RunConfig:
    return compose("train", [*RUN, f"data.path={home / 'text'}", f"data.cache_dir={home / 'cache'}", *words], RunConfig)


def result(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())


def result_of(run: RunConfig) -> dict[str, Any]:
    return train(run)[1]


def start(home: Path, base: str, *words: str) -> RunConfig:
    return composed(home, f"init_from={home / base}", *words)


# --- settings


def test_model_head_and_tokenizer_are_those_of_the_loaded_run(home: Path) -> None:
    run, base = start(home, "untied"), composed(home, *MODEL)
    assert run.model == replace(base.model, position="learned", previous_token_init=0)
    assert (run.head.name, run.head.head_lr_multiplier) == ("untied", 4.0)
    assert (run.tokenizer.kind, run.tokenizer.path) == ("file", str(home / "untied/model/tokenizer.json"))
    assert run.init_sha256 == read_base(str(home / "untied")).sha256
    assert (
        replace(run, model=base.model, head=base.head, tokenizer=base.tokenizer, init_from=None, init_sha256=None)
        == base
    )


def test_a_head_may_be_chosen_and_the_loaded_one_adjusted(home: Path) -> None:
    chosen = start(home, "untied", "head=untied_from_embedding").head
    assert chosen == composed(home, "head=untied_from_embedding").head
    adjusted = start(home, "untied", "head.head_lr_multiplier=2").head
    assert adjusted == replace(composed(home, "head=untied").head, head_lr_multiplier=2.0)


@pytest.mark.slow
def test_what_agrees_with_the_loaded_run_may_be_typed_again(home: Path) -> None:
    words = [*MODEL, "model=small", "tokenizer=char", "experiment=chars", "data.seq_len=32"]
    with pytest.raises(BadInput, match=r"model\.qk_norm=false: "):
        start(home, "tied", *words, "model.qk_norm=false")
    run = start(home, "tied", *words)
    assert replace(run.model, dropout=0.0) == start(home, "tied").model
    assert run.model.dropout == 0.1  # of the experiment: weights do not depend on it


@each(
    ("words", "said"),
    [
        (["model.n_layers=4"], "model.n_layers=4: the model of init_from=PATH has 1; leave it out"),  # the default
        (["model.n_kv_heads=2"], "model.n_kv_heads=2: the model of init_from=PATH has null; leave it out"),
        (["model=medium"], "model.n_layers=6: "),
        (["experiment=shakespeare_char", "tokenizer=char"], "model.n_layers=3: "),
        (["model.rope_theta=100"], "model.rope_theta=100.0: "),
        (["tokenizer=bpe"], "tokenizer.kind=bpe: the tokenizer of init_from=PATH has char; leave it out"),
        (["tokenizer.vocab_size=2048"], "tokenizer.vocab_size=2048: "),
        (["tokenizer=file", "tokenizer.path=/absent"], "tokenizer.path=/absent: "),
        (["init_sha256=00"], "init_sha256=00: init_from=PATH has "),
        (["init_tied_matrix=first"], "init_tied_matrix=first: choose one of embedding, head, mean"),
    ],
)
def test_what_contradicts_the_loaded_run_is_refused_by_key(home: Path, words: list[str], said: str) -> None:
    with pytest.raises(BadInput) as error:
        start(home, "tied", *words)
    assert str(error.value).startswith(said.replace("PATH", str(home / "tied")))


@each("name", ["linear", "norm", "ffn", "position"])
def test_a_class_is_imported_by_consent_alone(home: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(home / "tied", tmp_path / "r")
    path = tmp_path / "r/model/config.json"
    settings = read_sealed(path)
    model = settings["model"] | {name: "mine.Part", "previous_token_init": 0}
    write_sealed(path, settings | {"model": model})
    with pytest.raises(BadInput, match=f"mine.Part would be imported; add model.{name}=mine.Part"):
        composed(home, f"init_from={tmp_path / 'r'}")
    allowed = composed(home, f"init_from={tmp_path / 'r'}", f"model.{name}=mine.Part")
    assert getattr(allowed.model, name) == "mine.Part"


# --- identity


@pytest.mark.slow
def test_a_moved_run_is_the_same_and_other_weights_are_another(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "tied", tmp_path / "moved")
    hashes = [config_hash(composed(home, f"init_from={path}")) for path in (home / "tied", tmp_path / "moved")]
    assert hashes[0] == hashes[1]
    settings = composed(home, *MODEL, "tokenizer=char")
    assert config_hash(settings) not in hashes
    run = start(home, "tied")
    assert config_hash(replace(run, init_sha256="00")) != hashes[0]
    assert config_hash(replace(run, init_tied_matrix="mean")) != hashes[0]


# --- training


@each("head", ["tied", "untied_from_embedding"])
def test_the_first_loss_is_the_loaded_models(home: Path, tmp_path: Path, head: str) -> None:
    """With all validation batches, to the last bit; and with a learning rate of zero the weights stay."""
    run = start(home, "tied", f"head={head}", "optim.lr=0", "optim.adam_lr=0", f"run_dir={tmp_path / 'r'}")
    found, base = result_of(run), result(home / "tied")
    said = found["init_from"]
    assert said["val_loss"] == base["val_loss"] == found["val_loss"]
    assert said.get("val_loss_before_conversion", base["val_loss"]) == base["val_loss"]
    assert said["path"] == str(home / "tied")
    assert (said["sha256"], said["head"], said["steps"], said["tokens"]) == (run.init_sha256, "tied", 12, 12 * 128)
    assert found["tokenizer_hash"] == base["tokenizer_hash"]
    assert base["init_from"] is None
    old, new = (load_file(path / "model/model.safetensors") for path in (home / "tied", tmp_path / "r"))
    assert all(torch.equal(new[key], old[key]) for key in old)
    with open(tmp_path / "r/metrics.csv") as file:
        first = float(next(csv.DictReader(file))["train/loss"])
    losses = [float(loss_of_batch(home, run, seed)) for seed in (named_seed(0, "continued"), 0)]
    assert first == pytest.approx(losses[0], abs=1e-5)  # the first batch is not the loaded run's first one
    assert abs(first - losses[1]) > 1e-3


@torch.no_grad()
def loss_of_batch(home: Path, run: RunConfig, seed: int) -> torch.Tensor:
    net, _ = load_model(home / "tied")
    tokens, targets = TrainingStream(prepare(run.data, run.tokenizer).train, seq_len=32, batch_size=4, seed=seed).batch(
        0
    )
    return F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten())


def test_tying_needs_a_rule_and_reports_both_losses(home: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="choose init_tied_matrix=embedding, head, mean"):
        train(start(home, "untied", "head=tied", f"run_dir={tmp_path / 'r'}"))
    assert not (tmp_path / "r").exists()
    run = start(home, "untied", "head=tied", "init_tied_matrix=mean", f"run_dir={tmp_path / 'r'}")
    said = result_of(run)["init_from"]
    assert said["val_loss_before_conversion"] == result(home / "untied")["val_loss"]
    assert said["val_loss"] > said["val_loss_before_conversion"] + 0.01


def test_weights_that_give_no_loss_are_refused(home: Path, tmp_path: Path) -> None:
    net, tokenizer = load_model(home / "tied")
    with torch.no_grad():
        net.norm.weight.fill_(torch.nan)
    save_model(net, tokenizer, tmp_path / "model")
    with pytest.raises(BadInput, match=f"init_from={tmp_path}: its loss is nan"):
        train(composed(home, f"init_from={tmp_path}", f"run_dir={tmp_path / 'r'}"))
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_model_that_was_untied_in_training_stays_as_it_is_with_an_untied_head(home: Path, tmp_path: Path) -> None:
    train(composed(home, *MODEL, "tokenizer=char", "head=untied_midtraining", f"run_dir={tmp_path / 'base'}"))
    words = ["head=untied", "optim.lr=0", "optim.adam_lr=0", f"run_dir={tmp_path / 'r'}"]
    found = result_of(composed(home, f"init_from={tmp_path / 'base'}", *words))
    said = found["init_from"]
    losses = {said["val_loss"], said["val_loss_before_conversion"], found["val_loss"]}
    assert losses == {result(tmp_path / "base")["val_loss"]}


def test_a_pretrained_model_is_continued_with_either_head(home: Path, tmp_path: Path) -> None:
    """At a learning rate of zero nothing changes: a head of its own starts as a copy of the tied matrix."""
    shutil.copy(home / "text", tmp_path)
    write_folder(tmp_path / "theirs", FOLDERS["SmolLM2"]())
    there = load_file(tmp_path / "theirs/model.safetensors")["model.embed_tokens.weight"]
    found = {}
    for head in ("tied", "untied_from_embedding"):
        still = ["optim.lr=0", "optim.adam_lr=0", "trainer.max_steps=1"]
        found[head] = result_of(start(tmp_path, "theirs", *still, f"head={head}", f"run_dir={tmp_path / head}"))
        weights = load_file(tmp_path / head / "model/model.safetensors")
        matrices = {name for name, tensor in weights.items() if torch.equal(tensor, there)}
        assert matrices == {"embed.weight"} | ({"head.proj.weight"} if head != "tied" else set())
    assert found["tied"]["val_loss"] == found["untied_from_embedding"]["val_loss"]


@pytest.mark.slow
def test_untying_a_pretrained_model_is_an_ablation(home: Path, script: Script, tmp_path: Path) -> None:
    write_folder(tmp_path / "theirs", FOLDERS["SmolLM2"]())
    few = ["ablation.seeds=[0,1]", "ablation.tune.trials=0", "trainer.max_steps=4", "data.seq_len=32", "threads=1"]
    text = ["data=text", f"data.path={home / 'text'}", f"data.cache_dir={home / 'cache'}"]
    done = script("ablate", "ablation=continue_untied", "init_from=theirs", "output_dir=out", *few, *text)
    assert done.returncode == 0, done.stderr
    assert "untied" in done.stdout
    report = (tmp_path / "out/report.md").read_text()
    assert "all runs start from one given model (`theirs`" in report


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
    (newest,) = (tmp_path / "r/checkpoints").glob("step-00000012.*")
    newest.unlink()
    return tmp_path / "r"


def resumed(path: Path) -> dict[str, Any]:
    return result_of(compose("train", [f"run_dir={path}"], RunConfig))


def test_a_resume_does_not_need_the_loaded_run(interrupted: Path) -> None:
    shutil.rmtree(interrupted.parent / "base")
    found, whole = resumed(interrupted), result(interrupted.parent / "whole")
    assert found["resumed_from"] == [8]
    assert {key: found[key] for key in found.keys() - {*CLOCK}} == {key: whole[key] for key in whole.keys() - {*CLOCK}}
    for one in (interrupted, interrupted.parent / "whole"):  # and neither does scoring
        assert evaluate_run(EvaluateConfig(run_dir=str(one), threads=1))["loss"] == found["val_loss"]


def test_a_run_dir_that_is_not_there_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run_dir = tmp_path / "RUM"
    assert compose("train", [f"run_dir={run_dir}"], RunConfig).seed == 0
    assert caplog.messages == [f"run_dir={run_dir}: does not exist yet, so this is a new run"]


def test_without_a_checkpoint_the_same_weights_are_needed(interrupted: Path, home: Path) -> None:
    shutil.rmtree(interrupted / "checkpoints")
    shutil.rmtree(interrupted.parent / "base")
    with pytest.raises(BadInput, match=r"init_from=.*base: no such folder"):
        resumed(interrupted)
    shutil.copytree(home / "untied", interrupted.parent / "base")
    with pytest.raises(BadInput, match=r"init_from=.*base: its weights have the hash"):
        resumed(interrupted)
    found = result_of(compose("train", [f"run_dir={interrupted}", f"init_from={home / 'tied'}"], RunConfig))
    assert found["val_loss"] == result(interrupted.parent / "whole")["val_loss"]


@pytest.mark.slow
def test_another_loaded_run_is_another_run(interrupted: Path, home: Path) -> None:
    with pytest.raises(BadInput, match=r"holds another run .*init_sha256 is"):
        train(composed(home, f"init_from={home / 'untied'}", f"run_dir={interrupted}"))


# --- more steps


def test_more_steps_of_a_run_are_refused_with_the_way_out(home: Path, interrupted: Path) -> None:
    for place, way in ((home / "tied", ""), (interrupted, f"give only run_dir={interrupted} to finish it; ")):
        run = compose("train", [f"run_dir={place}", "trainer.max_steps=330"], RunConfig)
        with pytest.raises(BadInput) as error:
            train(run)
        assert str(error.value) == (
            f"trainer.max_steps is 12 there, 330 now: the learning rate of run_dir={place} decays to the end of its"
            f" own length; {way}init_from={place} starts a new run, with a schedule of its own"
        )


# --- bad input


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9] + b"[" * 9)


@each(
    ("name", "said"),
    [
        ("model", "holds no model; expected a run directory that train has finished"),
        ("model/config.json", "holds no model"),
        ("model/tokenizer.json", "tokenizer.json: no such file"),
        ("model/model.safetensors", "model.safetensors: no such file"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_read(home: Path, tmp_path: Path, name: str, said: str) -> None:
    shutil.copytree(home / "tied", tmp_path / "r")
    shutil.rmtree(tmp_path / "r/model") if name == "model" else (tmp_path / "r" / name).unlink()
    with pytest.raises(BadInput, match=said):
        composed(home, f"init_from={tmp_path / 'r'}")


@each("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_is_damaged_is_named(home: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(home / "tied", tmp_path / "r")
    spoil(tmp_path / "r/model" / name)
    with pytest.raises(BadInput, match=f"{name}: "):
        train(composed(home, f"init_from={tmp_path / 'r'}", f"run_dir={tmp_path / 'new'}"))
    assert not (tmp_path / "new").exists()


@each("text", ["[]", "{", "5", '{"model": []}', '{"model": {"type": {}}}', "[" * 100_000])
def test_of_what_is_no_tokenizer_nothing_is_known(text: str, tmp_path: Path) -> None:
    """The message is that of the tokenizer, which is read next."""
    (tmp_path / "tokenizer.json").write_text(text)
    assert kind_of(tmp_path / "tokenizer.json", 7) == {}


def test_what_the_loaded_model_cannot_do_is_named(home: Path, tmp_path: Path) -> None:
    new = f"run_dir={tmp_path / 'new'}"
    with pytest.raises(BadInput, match=r"data.seq_len=64: the loaded model has 32 learned positions"):
        train(start(home, "untied", "data.seq_len=64", new))
    (tmp_path / "other").write_text("é" * 2000)
    with pytest.raises(BadInput, match="does not know the character 'é'"):
        train(start(home, "tied", f"data.path={tmp_path / 'other'}", new))
    with pytest.raises(BadInput, match="init_tied_matrix=mean: is for a run with init_from"):
        train(composed(home, "init_tied_matrix=mean", new))
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_in_python_another_model_or_tokenizer_is_refused(home: Path, tmp_path: Path) -> None:
    run = start(home, "tied", f"run_dir={tmp_path / 'new'}")
    with pytest.raises(BadInput, match=r"model\.n_layers=4: init_from=.*tied has 1"):
        train(replace(run, model=ModelConfig()))
    with pytest.raises(BadInput, match=r"tokenizer: init_from=.*tied has another one"):
        train(replace(run, tokenizer=start(home, "untied").tokenizer))
    found = result_of(replace(run, head=HeadConfig(), init_sha256=None))
    hashes = found["data_hash"], found["tokenizer_hash"]
    assert found["config_hash"] == config_hash(replace(run, head=HeadConfig()), *hashes)


# --- the command


@pytest.mark.slow
def test_a_sweep_starts_from_a_run(home: Path, script: Script) -> None:
    words = [*RUN, f"data.path={home / 'text'}", f"init_from={home / 'tied'}", "trainer.max_steps=2"]
    found = script("train", "-m", *words, "head=tied,untied_from_embedding,untied")
    assert found.returncode == 0, found.stderr
    losses = [line.rpartition("loss of ")[2][:6] for line in found.stderr.splitlines() if "starts from" in line]
    assert losses == [f"{result(home / 'tied')['val_loss']:.4f}"] * 3
