"""What helps where a text is read many times: the best model, an average of the weights, and an order of documents."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import HEADS, TEXT
from safetensors.torch import load_file

from lm.cli.evaluate import EvaluateConfig
from lm.config import CheckpointConfig, DiagnosticsConfig, OptimConfig, TokenizerConfig
from lm.data.tokens import prepare
from lm.errors import Diverged, UserError
from lm.training.log import log_start
from lm.training.resolve import build_model
from lm.training.train import train
from tests.helpers.models import equal, weights
from tests.helpers.runs import change, column, losses, overfitting_run, result, rows, stop
from tests.helpers.scores import evaluate_run

KEEP_BEST = CheckpointConfig(every=5, keep=3, best=True)
IMPATIENT = replace(KEEP_BEST, patience=3)


def val_loss(folder):
    return float(evaluate_run(EvaluateConfig(run_dir=str(folder), threads=1))["loss"])


# --- checkpoint.best


@pytest.fixture(scope="module")
def best(text_file, tmp_path_factory):
    """A finished run that keeps its best model."""
    run = overfitting_run(text_file, tmp_path_factory.mktemp("finished") / "run", checkpoint=KEEP_BEST)
    train(run)
    return run


def test_the_model_is_the_best_one_and_the_curve_ends_with_the_last_one(best, text_file):
    folder = Path(str(best.run_dir))
    scores, chosen = result(folder), result(folder)["best"]
    estimates = {int(row["step"]): float(row["val/loss"]) for row in rows(folder)[:-1] if row["val/loss"]}
    assert chosen["step"] == min(estimates, key=lambda step: estimates[step])
    assert 2 < chosen["step"] < 22
    assert val_loss(folder) == scores["val_loss"] == chosen["val_loss"] < chosen["last_val_loss"]
    assert column(folder, "val/loss")[-1] == chosen["last_val_loss"]


@pytest.mark.slow
def test_nothing_but_the_model_differs_from_a_run_without(best, text_file, tmp_path):
    folder = Path(str(best.run_dir))
    _, scores = train(overfitting_run(text_file, tmp_path / "run"))
    assert rows(tmp_path / "run") == rows(folder)
    assert scores["best"] is None
    assert scores["val_loss"] == result(folder)["best"]["last_val_loss"]
    assert scores["config_hash"] != result(folder)["config_hash"], "it is another result, so another run"


@pytest.mark.slow
def test_a_run_that_a_signal_stops_leaves_its_best_model(best, text_file, tmp_path):
    stop(overfitting_run(text_file, tmp_path / "run", checkpoint=KEEP_BEST), 21)
    assert equal(weights(tmp_path / "run"), weights(Path(str(best.run_dir))))


@pytest.mark.slow
def test_a_diverged_run_leaves_its_best_model(text_file, tmp_path, monkeypatch):
    """Of one without `best`, nothing is left: tests/test_train.py."""
    layers, step = "tests.helpers.layers.Exploding", 9
    monkeypatch.setenv("DISTURBED_CALL", str(2 * 6 * 2 * (step - 1) + 1))  # layers, projections, micro-batches
    monkeypatch.setattr("tests.helpers.layers.Disturbing.calls", 0)
    run = overfitting_run(text_file, tmp_path / "best", checkpoint=CheckpointConfig(every=1, best=True))
    with pytest.raises(Diverged):
        train(replace(run, model=replace(run.model, linear=layers)))
    (*_, newest) = sorted((tmp_path / "best/checkpoints").iterdir())
    state = torch.load(newest, weights_only=True)
    assert state["best_step"] > 0
    assert equal(weights(tmp_path / "best"), load_file(newest.with_name(f"best-{state['best_step']:08d}.safetensors")))


def test_a_run_ends_after_validations_without_a_lower_loss(best, text_file, tmp_path):
    """Its resume: tests/test_resume.py."""
    _, scores = train(overfitting_run(text_file, tmp_path / "run", checkpoint=IMPATIENT))
    folder, whole = tmp_path / "run", Path(str(best.run_dir))
    assert (scores["ended_by"], result(whole)["ended_by"]) == ("patience", "steps")
    assert scores["steps"] == scores["best"]["step"] + 3 * 2 < result(whole)["steps"] == 24
    assert scores["tokens"] == scores["steps"] * best.tokens_per_step
    assert rows(folder)[:-1] == rows(whole)[: scores["steps"] - 1]
    assert int(rows(folder)[-1]["step"]) == scores["steps"]
    assert column(folder, "val/loss")[-1] == scores["best"]["last_val_loss"]
    assert equal(weights(folder), weights(whole))


def test_the_model_is_the_average_over_the_steps_of_the_same_training(text_file, tmp_path):
    """Also across the step in which the head is untied: until then its average is that of the embedding."""
    settings = {"max_steps": 12, "head": HEADS["untied_midtraining"], "checkpoint": CheckpointConfig(every=1, keep=100)}
    optim = OptimConfig(lr=0.02, warmup_steps=2)
    train(overfitting_run(text_file, tmp_path / "plain", optim=optim, **settings))
    run = overfitting_run(text_file, tmp_path / "run", optim=replace(optim, ema=0.5), **settings)
    folder, scores = train(run)
    assert losses(folder) == losses(tmp_path / "plain")
    steps = [torch.load(path, weights_only=True) for path in sorted((folder / "checkpoints").iterdir())]
    average = build_model(run, 257).state_dict()
    for i, step in enumerate(steps):
        decay = min(0.5, (1 + i) / (10 + i))
        average = {name: decay * tensor + (1 - decay) * step["net"][name] for name, tensor in average.items()}
    saved = weights(folder)
    for name, tensor in average.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-4, atol=1e-6)
    assert not torch.equal(saved["head.proj.weight"], saved["embed.weight"])
    assert not torch.allclose(saved["norm.weight"], steps[-1]["net"]["norm.weight"])
    assert val_loss(folder) == scores["val_loss"]


# --- data.order


def test_documents_are_where_an_end_of_text_token_stands(text_file):
    data = prepare(overfitting_run(text_file, Path("run")).data, TokenizerConfig(kind="byte", vocab_size=None))
    assert data.document_starts().tolist() == [0]
    three = replace(data, train=np.array([data.tokenizer.eot, 1, 2, data.tokenizer.eot, 3, data.tokenizer.eot, 4]))
    assert three.document_starts().tolist() == [0, 3, 5]


@pytest.mark.nightly
def test_a_run_of_some_minutes_is_one_of_the_steps_that_take_so_long(text_file, tmp_path):
    """They are counted once: a resume makes as many, bit for bit, though it may find the machine faster."""
    settings = {"max_minutes": 0.05, "diagnostics": DiagnosticsConfig(every=4)}
    run = overfitting_run(text_file, tmp_path / "minutes", **settings)
    stop(run, 8)
    with pytest.raises(UserError, match="compile is False there, True now"):
        train(replace(run, compile=True))
    _, scores = train(run)
    assert (scores["ended_by"], scores["resumed_from"]) == ("steps", [8])
    assert 0.1 * 3 < scores["seconds"] < 10 * 3, "a machine may become busy"
    of_steps = change(run, run_dir=str(tmp_path / "steps"), max_minutes=None, max_steps=scores["steps"])
    assert train(of_steps)[1]["config_hash"] != scores["config_hash"]
    for name in ("metrics.csv", "diagnostics.csv", "model/model.safetensors"):
        assert (tmp_path / "minutes" / name).read_bytes() == (tmp_path / "steps" / name).read_bytes()
    assert train(run)[1] == scores, "it is finished"


def test_a_run_says_how_often_its_text_is_read(tmp_path, caplog):
    """With dropout it is meant to be read often."""
    caplog.set_level("INFO")
    for n_bytes, dropout, times in ((7_000, 0.0, 0.4), (240, 0.0, 12.7), (240, 0.1, 12.7)):
        (tmp_path / "text.txt").write_text(TEXT[:n_bytes])
        run = overfitting_run(tmp_path / "text.txt", tmp_path / "run")
        run = replace(run, model=replace(run.model, dropout=dropout))
        data = prepare(run.data, run.tokenizer)
        log_start(run, data, tmp_path / "run", 9_999, 0)
        (line,) = (message for message in caplog.messages[-2:] if "9,999 parameters" in message)
        assert f"steps read the {n_bytes + 1:,} training tokens {times} times" in line
        assert ("learned by heart: see docs/own-text.md" in line) == (times > 10 and not dropout)
        assert "the run ends before its learning rate" not in caplog.text
    log_start(replace(run, optim=replace(run.optim, warmup_steps=run.steps)), data, tmp_path / "run", 9_999, 0)
    assert f"optim.warmup_steps={run.steps}: the run ends before its learning rate reaches its peak" in caplog.text
