"""What helps where a text is read many times: the best model, an average of the weights, and an order of documents."""

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HEADS, TEXT
from safetensors.torch import load_file

from lm.config import (
    CheckpointConfig,
    DiagnosticsConfig,
    EvaluateConfig,
    OptimConfig,
    RunConfig,
    TokenizerConfig,
    UserError,
    ValidationConfig,
)
from lm.data.tokens import prepare
from lm.data.vocabulary import byte_tokenizer
from lm.inference.evaluate import evaluate_run
from lm.training.best import BestModel
from lm.training.resolve import build_model
from lm.training.train import train
from tests.helpers.runs import (
    checkpoints,
    column,
    exit_code,
    finish,
    losses,
    outcome,
    overfitting_run,
    result,
    rows,
    signal_at,
)

KEEP_BEST = CheckpointConfig(every=5, keep=3, best=True)
IMPATIENT = replace(KEEP_BEST, patience=3)


def val_loss(folder: Path) -> float:
    return float(evaluate_run(EvaluateConfig(run_dir=str(folder), threads=1))["loss"])


def kill_at_the_score() -> None:
    """Let this process be killed when it scores the last model."""
    import lm.training.train as training

    setattr(training, "evaluate", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010, of its own name


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model/model.safetensors")


# --- checkpoint.best


Finish = Callable[[CheckpointConfig], RunConfig]


@pytest.fixture(scope="module")
def finished(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Finish:
    """A finished run that has these settings of checkpoints."""

    def finished(checkpoint: CheckpointConfig) -> RunConfig:
        run = overfitting_run(text_file, tmp_path_factory.mktemp("finished") / "run", checkpoint=checkpoint)
        train(run)
        return run

    return finished


@pytest.fixture(scope="module")
def best(finished: Finish) -> RunConfig:
    return finished(KEEP_BEST)


def test_the_model_is_the_best_one_and_the_curve_ends_with_the_last_one(best: RunConfig, text_file: Path) -> None:
    folder = Path(str(best.run_dir))
    scores, chosen = result(folder), result(folder)["best"]
    estimates = {int(row["step"]): float(row["val/loss"]) for row in rows(folder)[:-1] if row["val/loss"]}
    assert chosen["step"] == min(estimates, key=lambda step: estimates[step])
    assert 2 < chosen["step"] < 22
    assert val_loss(folder) == scores["val_loss"] == chosen["val_loss"] < chosen["last_val_loss"]
    assert column(folder, "val/loss")[-1] == chosen["last_val_loss"]


def test_nothing_but_the_model_differs_from_the_run_without_it(
    best: RunConfig, text_file: Path, tmp_path: Path
) -> None:
    plain, folder = overfitting_run(text_file, tmp_path / "run"), Path(str(best.run_dir))
    _, scores = train(plain)
    assert rows(tmp_path / "run") == rows(folder)
    assert scores["best"] is None
    assert scores["val_loss"] == result(folder)["best"]["last_val_loss"]
    assert scores["config_hash"] != result(folder)["config_hash"], "it is another result, so another run"


def test_the_last_model_is_kept_where_it_is_the_best(text_file: Path, tmp_path: Path) -> None:
    run = overfitting_run(text_file, tmp_path / "run", checkpoint=KEEP_BEST, max_steps=7)
    _, scores = train(run)
    assert scores["best"] == {"step": 7, "val_loss": scores["val_loss"], "last_val_loss": scores["val_loss"]}


@pytest.mark.slow
def test_a_run_that_a_signal_stops_leaves_its_best_model(best: RunConfig, text_file: Path, tmp_path: Path) -> None:
    run = overfitting_run(text_file, tmp_path / "run", checkpoint=KEEP_BEST)
    assert finish(run, partial(signal_at, 21, signal.SIGTERM)) == exit_code(signal.SIGTERM)
    stopped, whole = weights(tmp_path / "run"), weights(Path(str(best.run_dir)))
    assert {name: tensor.tolist() for name, tensor in stopped.items()} == {
        name: tensor.tolist() for name, tensor in whole.items()
    }


# --- checkpoint.patience


@pytest.fixture(scope="module")
def impatient(finished: Finish) -> RunConfig:
    return finished(IMPATIENT)


def test_a_run_ends_after_so_many_validations_without_a_lower_loss(best: RunConfig, impatient: RunConfig) -> None:
    folder, whole = Path(str(impatient.run_dir)), Path(str(best.run_dir))
    scores, planned = result(folder), result(whole)
    assert (scores["ended_by"], planned["ended_by"]) == ("patience", "steps")
    assert scores["steps"] == scores["best"]["step"] + 3 * 2 < planned["steps"] == 24
    assert scores["tokens"] == scores["steps"] * impatient.tokens_per_step
    assert rows(folder)[:-1] == rows(whole)[: scores["steps"] - 1]
    assert int(rows(folder)[-1]["step"]) == scores["steps"]
    assert column(folder, "val/loss")[-1] == scores["best"]["last_val_loss"]
    assert weights(folder).keys() == weights(whole).keys()
    assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(folder).items())


@pytest.mark.slow
@pytest.mark.parametrize("before", [partial(signal_at, 17, signal.SIGKILL), kill_at_the_score])
def test_a_killed_run_ends_at_the_same_step(before: Any, impatient: RunConfig, tmp_path: Path) -> None:
    run = replace(impatient, run_dir=str(tmp_path / "run"))
    assert finish(run, before) == -signal.SIGKILL
    _, scores = train(run)
    assert scores["resumed_from"] == [15 if before is not kill_at_the_score else scores["steps"]]
    assert outcome(run) == outcome(impatient)


@pytest.mark.slow
def test_the_comparison_sees_a_resume_that_forgets_the_best_step(
    impatient: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(impatient, run_dir=str(tmp_path / "run"))
    assert finish(run, partial(signal_at, 17, signal.SIGKILL)) == -signal.SIGKILL
    monkeypatch.setattr(BestModel, "load_state_dict", lambda *_: None)
    train(run)
    assert outcome(run) != outcome(impatient)


# --- optim.ema


def test_the_model_is_the_average_over_the_steps(text_file: Path, tmp_path: Path) -> None:
    """Also across the step in which the head is untied: until then its average is that of the embedding."""
    optim, every = OptimConfig(lr=0.02, warmup_steps=2, ema=0.5), CheckpointConfig(every=1, keep=100)
    head = HEADS["untied_midtraining"]
    run = overfitting_run(text_file, tmp_path, max_steps=12, head=head, optim=optim, checkpoint=every)
    train(run)
    steps = [torch.load(path, weights_only=True) for path in sorted((tmp_path / "checkpoints").iterdir())]
    average = build_model(run, 257).state_dict()
    for i, step in enumerate(steps):
        decay = min(0.5, (1 + i) / (10 + i))
        average = {
            name: decay * tensor + (1 - decay) * step["state_dict"][f"net.{name}"] for name, tensor in average.items()
        }
    saved = weights(tmp_path)
    for name, tensor in average.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-4, atol=1e-6)
    assert not torch.equal(saved["head.proj.weight"], saved["embed.weight"])
    assert not torch.allclose(saved["norm.weight"], steps[-1]["state_dict"]["net.norm.weight"])
    assert val_loss(tmp_path) == result(tmp_path)["val_loss"]


@pytest.mark.slow
def test_training_itself_is_as_without_an_average(text_file: Path, tmp_path: Path) -> None:
    optim = OptimConfig(lr=0.02, warmup_steps=2, decay="constant")
    for name, ema, is_checkpointed in (("plain", None, False), ("average", 0.9, False), ("recomputed", 0.9, True)):
        run = overfitting_run(text_file, tmp_path / name, max_steps=10, optim=replace(optim, ema=ema))
        train(replace(run, activation_checkpointing=is_checkpointed))
    assert losses(tmp_path / "plain") == losses(tmp_path / "average")
    assert column(tmp_path / "plain", "val/loss") != column(tmp_path / "average", "val/loss")
    assert rows(tmp_path / "average") == rows(tmp_path / "recomputed")


# --- data.order


def test_documents_are_where_an_end_of_text_token_stands(text_file: Path) -> None:
    data = prepare(overfitting_run(text_file, Path("run")).data, TokenizerConfig(kind="byte", vocab_size=None))
    assert data.documents().tolist() == [0]
    three = replace(data, train=np.array([data.tokenizer.eot, 1, 2, data.tokenizer.eot, 3, data.tokenizer.eot, 4]))
    assert three.documents().tolist() == [0, 3, 5]


@pytest.mark.parametrize("source", ["text", "tokens"])
def test_an_order_of_documents_needs_documents(source: str, text_file: Path, tmp_path: Path) -> None:
    run = overfitting_run(text_file, tmp_path / "run")
    data = replace(run.data, order="documents")
    if source == "tokens":
        for name in ("train", "val"):
            (1 + np.arange(2000) % 96).astype(np.uint16).tofile(tmp_path / name)
        (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_json())
        data = replace(data, source=source, path=str(tmp_path / "train"), val_path=str(tmp_path / "val"))
        run = replace(
            run, tokenizer=TokenizerConfig(kind="file", path=str(tmp_path / "tokenizer.json"), vocab_size=None)
        )
    with pytest.raises(UserError, match=r"^data\.order=documents: ") as caught:
        train(replace(run, data=data))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


# --- max_minutes

SECONDS = 4.0


def timed_run(text: Path, folder: Path) -> RunConfig:
    optim = OptimConfig(lr=0.02, warmup_steps=2)
    return overfitting_run(text, folder, optim=optim, max_minutes=SECONDS / 60, validation=ValidationConfig(every=0))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [None, signal.SIGKILL])
def test_a_run_of_some_minutes_ends_in_time_with_its_learning_rate_decayed(
    signum: int | None, text_file: Path, tmp_path: Path
) -> None:
    """Also where it is killed and resumed: it has the time that was left at its checkpoint."""
    run = timed_run(text_file, tmp_path)
    if signum:
        assert finish(run, partial(signal_at, 8, signum)) == -signum
    _, scores = train(run)
    assert scores["ended_by"] == "time"
    assert scores["steps"] > 8
    assert scores["tokens"] == scores["steps"] * run.tokens_per_step
    assert 0.7 * SECONDS < scores["seconds"] < 1.1 * SECONDS
    assert [int(row["step"]) for row in rows(tmp_path)] == [*range(1, scores["steps"] + 1)]
    rates = column(tmp_path, "lr")
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[2] > 0.5 * 0.02
    assert rates[-1] < 0.15 * 0.02
    assert scores["resumed_from"] == ([5] if signum else [])


@pytest.mark.slow
def test_a_run_of_some_minutes_that_is_killed_at_its_final_score_makes_no_further_step(
    text_file: Path, tmp_path: Path
) -> None:
    run = timed_run(text_file, tmp_path)
    assert finish(run, kill_at_the_score) == -signal.SIGKILL
    (step,) = [number for number in checkpoints(run) if number % 5] or checkpoints(run)[-1:]
    _, scores = train(run)
    assert (scores["steps"], scores["resumed_from"]) == (step, [step])
    assert [int(row["step"]) for row in rows(tmp_path)] == [*range(1, step + 1)]


# --- what is said at the start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_bytes", "read", "named", "unnamed"),
    [
        (7_000, "0.4 times", [], ["checkpoint.best", "optim.ema", "model.dropout"]),
        (240, "12.7 times", ["optim.ema", "optim.weight_decay"], ["checkpoint.best", "model.dropout", "data.order"]),
    ],
)
def test_a_run_says_how_often_its_text_is_read_and_above_ten_times_what_else_helps(
    n_bytes: int, read: str, named: list[str], unnamed: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "text.txt").write_text(TEXT[:n_bytes])
    with caplog.at_level("INFO"):
        train(overfitting_run(tmp_path / "text.txt", tmp_path / "run", checkpoint=KEEP_BEST))  # it has dropout
    assert [word for word in [read, *named] if word not in caplog.text] == []
    assert [word for word in unnamed if word in caplog.text] == []


# --- what is refused


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("checkpoint.best", {"checkpoint": KEEP_BEST, "validation": ValidationConfig(every=0)}),
        ("checkpoint.best", {"checkpoint": KEEP_BEST, "validation": ValidationConfig(every=24)}),
        ("max_minutes", {"max_minutes": 0.0}),
        ("max_minutes", {"max_minutes": math.inf}),
        ("max_minutes", {"max_minutes": 1.0, "max_tokens": 1000}),
        ("max_minutes", {"max_minutes": 1.0, "devices": 2}),
        ("diagnostics.every", {"max_minutes": 1.0, "diagnostics": DiagnosticsConfig(every=1)}),
        ("checkpoint.patience", {"checkpoint": CheckpointConfig(patience=3), "validation": ValidationConfig(every=0)}),
        ("diagnostics.every", {"checkpoint": IMPATIENT, "diagnostics": DiagnosticsConfig(every=1)}),
        ("optim.ema", {"optim": OptimConfig(ema=0.9), "precision": "bf16-true"}),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_key(key: str, changes: dict[str, Any], text_file: Path) -> None:
    with pytest.raises(UserError, match=rf"^{key}\b") as caught:
        overfitting_run(text_file, Path("run"), **changes)
    assert "\n" not in str(caught.value)
