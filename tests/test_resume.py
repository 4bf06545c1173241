"""A run that is killed and resumed ends with the same numbers, bit for bit, as an undisturbed one."""

import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import some

import lm.training.state
import lm.training.train
from lm.config import CheckpointConfig, DiagnosticsConfig, HeadConfig, OptimConfig, RunConfig, ValidationConfig
from lm.data.batches import Batch, TrainingStream
from lm.data.tokens import TextData, prepare
from lm.errors import UserError
from lm.folder import load_model, read_weights
from lm.model.head import UntiedMidTrainingHead
from lm.scoring import validate
from lm.training.state import best_files, newest_checkpoint, step_of
from lm.training.train import lr_factor, train
from tests.helpers.runs import (
    MUON,
    change,
    checkpoints,
    compiles,
    composed,
    exit_code,
    finish,
    outcome,
    overfitting_run,
    result,
    rows,
    set_environment,
    signal_at,
    small_run,
    spawn,
    wait_for,
)

KILL, TERM = signal.SIGKILL, signal.SIGTERM
MIDTRAINING = HeadConfig(
    name="untied_midtraining", kind="untied_midtraining", embedding_std=0.02, head_lr_multiplier=0.5, untie_at=0.5
)
UNTIED, UNTYING = "untied, AdamW, diagnostics, samples", "untied in mid-training, AdamW, smoothed targets"
DOCUMENTS = "tied, Muon, bf16, documents in a new order in each epoch"
COMPILED = "untied in mid-training, compiled, average of the weights, documents apart"
BEST = "untied in mid-training, Muon, best model of an average of the weights, ends by patience"
VARIANTS: dict[str, dict[str, Any]] = {  # each is also a run with dropout and accumulation
    UNTIED: {"diagnostics": DiagnosticsConfig(every=3), "gradient_clip_val": 1.85, "prompts": ["def "]},
    UNTYING: {"head": MIDTRAINING, "prompts": ["def "], "ngram_smoothing": 0.5},
    DOCUMENTS: {"head": HeadConfig(embedding_std=0.02), "optim": MUON, "precision": "bf16-mixed"},
    COMPILED: {"head": MIDTRAINING, "optim": replace(MUON, ema=0.5), "compile": True},
    BEST: {
        "head": MIDTRAINING,
        "optim": replace(MUON, lr=0.05, adam_lr=0.03, warmup_steps=2, decay="constant", ema=0.5),
        "checkpoint": CheckpointConfig(every=5, keep=3, best=True, patience=5),
    },
}


def cases(*rows: Any) -> list[Any]:
    """Cases of a test, which begin with a variant; those of some variants are nightly."""
    rows = [row if isinstance(row, tuple) else (row,) for row in rows]
    marks = {DOCUMENTS: [pytest.mark.nightly], BEST: [pytest.mark.nightly], COMPILED: [pytest.mark.nightly, compiles]}
    return [pytest.param(*row, marks=marks.get(row[0], [])) for row in rows]


Runs = Callable[..., RunConfig]


def small(text: Path, run_dir: Path, **changes: Any) -> RunConfig:
    """Twenty-four logged steps; a head that is untied in mid-training is so before step 13."""
    settings = {"max_steps": 24, "log_every_n_steps": 1, "checkpoint": CheckpointConfig(every=5, keep=3)}
    return small_run(text, run_dir, **{**settings, **changes})


def shuffled(run: RunConfig) -> RunConfig:
    """The run with documents in a new order in each epoch, of which there are four or five."""
    folder = Path(str(run.data.path)).parent / "documents"
    folder.mkdir(exist_ok=True)
    for i, line in enumerate(Path(str(run.data.path)).read_text().splitlines()[:24]):
        (folder / f"{i}.txt").write_text(line)
    return replace(run, data=replace(run.data, path=str(folder), order="documents"))


@pytest.fixture(scope="module")
def whole(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The undisturbed run of a variant."""
    runs: dict[str, RunConfig] = {}

    def run_of(variant: str) -> RunConfig:
        if variant not in runs:
            run_of_variant = overfitting_run if variant == BEST else small
            run = run_of_variant(text_file, tmp_path_factory.mktemp("whole") / "run", **VARIANTS[variant])
            run = replace(run, data=replace(run.data, document_mask=True)) if variant == COMPILED else run
            runs[variant] = shuffled(run) if variant == DOCUMENTS else run
            train(runs[variant])
        return runs[variant]

    return run_of


@pytest.fixture(scope="module")
def killed(whole: Runs, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A copy of the run of a variant as SIGKILL left it after a step."""
    folders: dict[tuple[str, int], Path] = {}

    def copied(variant: str, step: int, folder: Path) -> RunConfig:
        if (variant, step) not in folders:
            folders[variant, step] = tmp_path_factory.mktemp("killed") / "run"
            stop(change(whole(variant), run_dir=str(folders[variant, step])), step, KILL)
        shutil.copytree(folders[variant, step], folder)
        return change(whole(variant), run_dir=str(folder))

    return copied


def stop(run: RunConfig, step: int, signum: signal.Signals) -> None:
    assert finish(run, partial(signal_at, step, signum)) == exit_code(signum)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("[!.]*") if path.is_file()}


# --- stopped and resumed


@pytest.mark.parametrize("variant", cases(UNTYING, DOCUMENTS, BEST, COMPILED))
def test_a_run_stopped_twice_ends_as_an_undisturbed_one(whole: Runs, tmp_path: Path, variant: str) -> None:
    """So does UNTIED where its disk is full, and UNTYING where it resumes from step 15."""
    run = change(whole(variant), run_dir=str(tmp_path / "run"))
    for step, signum in ((12, TERM), (21, KILL)):
        stop(run, step, signum)
    _, scores = train(run)
    assert outcome(run) == outcome(whole(variant))
    assert scores["resumed_from"] == [12, 20]
    assert (scores["steps"], scores["ended_by"]) == ((22, "patience") if variant == BEST else (24, "steps"))
    assert [int(row["step"]) for row in rows(tmp_path / "run")] == list(range(1, scores["steps"] + 1))
    assert not list((tmp_path / "run").rglob(".partial*"))


def signal_before_the_first_step() -> None:
    build = lm.training.train.build_optimizer
    lm.training.train.build_optimizer = lambda *args: (os.kill(os.getpid(), TERM), build(*args))[1]


@pytest.mark.nightly
def test_a_run_stopped_before_its_first_step_ends_as_an_undisturbed_one(whole: Runs, tmp_path: Path) -> None:
    """The signal ends it at once: nothing is lost. A kill at any operation of a run: tests/test_faults.py, nightly."""
    run = change(whole(UNTYING), run_dir=str(tmp_path / "run"))
    assert finish(run, signal_before_the_first_step) == -TERM
    assert not (tmp_path / "run/metrics.csv").exists()
    train(run)
    assert outcome(run) == outcome(whole(UNTYING))
    assert result(tmp_path / "run")["resumed_from"] == []


def test_an_interrupt_after_the_result_leaves_its_model(
    whole: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(Path(str(whole(UNTYING).data.path)), tmp_path / "run", max_steps=8)
    run = replace(run, checkpoint=CheckpointConfig(best=True), validation=ValidationConfig(every=3, batches=1))
    write = lm.training.train.write_json
    interrupted = lambda *args: (write(*args), os.kill(os.getpid(), signal.SIGINT))  # noqa: E731
    monkeypatch.setattr(lm.training.train, "write_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    before = files(tmp_path / "run/model")
    monkeypatch.undo()
    assert train(run)[1]["best"]["step"] == 8
    scores = validate(load_model(tmp_path / "run")[0], run, prepare(run.data, run.tokenizer))
    assert scores.loss == result(tmp_path / "run")["val_loss"]
    assert files(tmp_path / "run/model") == before


# --- within a step


def disturbed_run(text: Path, folder: Path, layer: str) -> tuple[RunConfig, dict[str, str]]:
    """A run whose linear class disturbs its fifth step, and the environment that says so."""
    run = small(text, folder / "run", checkpoint=CheckpointConfig(every=3), max_steps=12)
    n_layers, n_projections, micro_batches = 2, 6, 2
    call = n_layers * n_projections * (4 * micro_batches + 1) + 5
    environment = {"DISTURBED_CALL": str(call), "DISTURBED_FILE": str(folder / "disturbed")}
    return replace(run, model=replace(run.model, linear=f"tests.helpers.layers.{layer}")), environment


def test_an_error_within_a_step_saves_nothing(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a signal has arrived in the step; the error is what is reported."""
    run, environment = disturbed_run(text_file, tmp_path, "Signalling")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="a layer of mine"):
        train(run)
    assert checkpoints(run) == [3]
    assert not (tmp_path / "run/model").exists()


@pytest.mark.parametrize(
    ("shutdown", "seconds"),
    [([signal.SIGINT], 0.5), pytest.param([TERM, signal.SIGHUP, TERM], 2, marks=pytest.mark.nightly)],
)
def test_signals_of_one_shutdown_are_one_and_a_later_one_ends_a_run_at_once(
    shutdown: list[signal.Signals], seconds: float, text_file: Path, tmp_path: Path
) -> None:
    """Also in one long operation."""
    run, environment = disturbed_run(text_file, tmp_path, "Long")
    process = spawn(run, partial(set_environment, **environment))
    wait_for((tmp_path / "disturbed").exists)
    for signum in shutdown:
        os.kill(process.pid, signum)
        time.sleep(0.2)
    time.sleep(seconds)
    assert process.is_alive()
    os.kill(process.pid, shutdown[0])
    process.join(10)
    assert process.exitcode == 128 + shutdown[0]
    assert checkpoints(run) == [3]
    assert not (tmp_path / "run/model").exists()


@pytest.mark.parametrize("signum", some([None, signal.SIGTERM], 2))
def test_a_step_that_is_not_finite_is_not_saved(signum: signal.Signals | None, text_file: Path, tmp_path: Path) -> None:
    """Nor where a signal ends the run after it, before the loss is looked at."""
    optim, every = OptimConfig(lr=1e15, warmup_steps=0), CheckpointConfig(every=1 if signum is None else 100, keep=100)
    run = small(text_file, tmp_path / "run", optim=optim, checkpoint=every, log_every_n_steps=100)
    assert finish(run, partial(signal_at, 9, signum) if signum else None) == 2
    for path in tmp_path.glob("run/checkpoints/*"):
        weights = torch.load(path, weights_only=True)["net"]
        assert all(tensor.isfinite().all() for tensor in weights.values())
    assert not (tmp_path / "run/model").exists()


def batch_from_the_start(stream: TrainingStream, k: int) -> Batch:
    return batch(stream, k - 40)  # of step 20, in two micro-batches


def lr_factor_from_the_start(step: int, *others: Any) -> float:
    return lr_factor(step - 20, *others)


def untie_without_moments(head: Any, progress: float, embedding: Any, state: Any) -> None:
    on_train_step(head, progress, embedding, {key: value for key, value in state.items() if key is not embedding})


on_train_step, batch = UntiedMidTrainingHead.on_train_step, TrainingStream.batch


def other_weights(*args: Any) -> dict[str, torch.Tensor]:
    return {name: tensor + 1e-6 for name, tensor in read_weights(*args).items()}


def moments(checkpoint: dict[str, Any]) -> dict[int, Any]:
    return checkpoint["optimizer"]["state"]


CONTROLS: list[tuple[str, int, Any]] = [  # how to break a resume: a change of the checkpoint, or a patch
    (UNTIED, 21, lambda checkpoint: [state["exp_avg"].zero_() for state in moments(checkpoint).values()]),
    (UNTIED, 21, lambda checkpoint: checkpoint["optimizer"]["param_groups"][0].update(peak_lr=0.1)),
    (UNTIED, 21, lambda checkpoint: checkpoint["net"]["norm.weight"].add_(1e-6)),
    (UNTIED, 21, lambda checkpoint: checkpoint.update(n_clipped=0)),
    (UNTYING, 21, lambda checkpoint: moments(checkpoint).pop(max(moments(checkpoint)))),  # it unties a second time
    (UNTIED, 21, (TrainingStream, "batch", batch_from_the_start)),
    (UNTIED, 21, (lm.training.train, "lr_factor", lr_factor_from_the_start)),
    (UNTIED, 21, (lm.training.train, "named_seed", lambda *_: 1)),  # of dropout
    (UNTYING, 12, (UntiedMidTrainingHead, "on_train_step", untie_without_moments)),
    (DOCUMENTS, 21, (TextData, "documents", lambda data: np.array([0, 100]))),
    (BEST, 21, lambda checkpoint: checkpoint.update(best_step=0, best_loss=math.inf, best_sha256="")),
    (BEST, 21, (lm.training.state, "read_weights", other_weights)),
    (BEST, 21, lambda checkpoint: checkpoint.update(average=checkpoint["net"])),
]


@pytest.mark.parametrize(("variant", "step", "broken"), some(CONTROLS, 7))
def test_the_comparison_sees_what_a_resume_forgets(
    whole: Runs, killed: Runs, tmp_path: Path, variant: str, step: int, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = killed(variant, step, tmp_path / "run")

    def changed(*args: Any) -> Any:
        checkpoint = newest_checkpoint(*args)
        broken(checkpoint)
        return checkpoint

    monkeypatch.setattr(*(broken if isinstance(broken, tuple) else (lm.training.train, "newest_checkpoint", changed)))
    train(run)
    assert outcome(run) != outcome(whole(variant))
    assert result(tmp_path / "run")["resumed_from"] == [step // 5 * 5]


# --- checkpoints


@pytest.mark.parametrize(("restarts", "resumed_from"), some([("0", []), ("1", [20])], 2))
def test_without_resume_a_run_starts_again_once(
    restarts: str, resumed_from: list[int], whole: Runs, killed: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where torchrun starts it again; and no command that follows does it, for it is not saved."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    run = killed(UNTIED, 21, tmp_path / "run")
    train(replace(run, checkpoint=CheckpointConfig(every=10, resume=False)))
    assert result(tmp_path / "run")["resumed_from"] == resumed_from
    assert outcome(run) == outcome(whole(UNTIED))
    again = composed(f"run_dir={tmp_path / 'run'}")
    assert (again.checkpoint.resume, again.checkpoint.every) == (True, 10)


def test_a_full_disk_loses_nothing(whole: Runs, killed: Runs, tmp_path: Path) -> None:
    """Also where torch reports the error of the file as its own, which it does but for the last bytes of a file."""
    run = killed(UNTIED, 21, tmp_path / "run")
    before = checkpoints(run)
    assert [finish(run, file_size=size) for size in (20_000, 50_000)] == [74, 74]
    assert checkpoints(run) == before
    assert not list((tmp_path / "run").rglob(".partial*"))
    train(run)
    assert outcome(run) == outcome(whole(UNTIED))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def flip_a_bit_of_a_weight(path: Path) -> None:
    content = bytearray(path.read_bytes())
    weight = torch.load(path, weights_only=True)["net"]["embed.weight"].numpy().tobytes()
    content[content.index(weight) + 400] ^= 64
    path.write_bytes(content)


def copy_an_older_one(path: Path) -> None:
    shutil.copy(path.with_stem("step-00000015"), path)
    shutil.copy(path, path.with_stem("step-00000020 (copy)"))


@pytest.mark.parametrize("damage", some([flip_a_bit_of_a_weight, cut, copy_an_older_one], 2))
def test_a_checkpoint_that_is_not_whole_is_skipped_with_a_warning(
    damage: Callable[[Path], None], whole: Runs, killed: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = killed(UNTYING, 21, tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step-00000020.ckpt"
    damage(newest)
    train(run)
    assert any(str(newest) in record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert outcome(run) == outcome(whole(UNTYING))
    assert result(tmp_path / "run")["resumed_from"] == [15]


@pytest.mark.slow
def test_each_checkpoint_has_its_best_weights(whole: Runs, killed: Runs, tmp_path: Path) -> None:
    """Also the one before the newest, with which a run goes on that has lost the newest."""
    run, folder = killed(BEST, 21, tmp_path / "run"), tmp_path / "run/checkpoints"
    named = {torch.load(path, weights_only=True)["best_step"] for path in folder.glob("step-*")}
    assert {step_of(path) for path in best_files(folder)} == named, "and no older ones"
    cut(folder / "step-00000020.ckpt")
    later = folder / "best-00000021.safetensors"  # than the state that is resumed
    later.touch()
    train(run)
    assert outcome(run) == outcome(whole(BEST))
    assert result(tmp_path / "run")["resumed_from"] == [15]
    assert not later.exists()


def cut_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:1000])


def add_one_of_another_run(folder: Path) -> None:
    content = torch.load(folder / "step-00000020.ckpt", weights_only=True)
    torch.save(content | {"config_hash": "another"}, folder / "step-00000021.ckpt")


@pytest.mark.parametrize("damage", [cut_all, add_one_of_another_run])
def test_checkpoints_of_no_use_are_refused(damage: Callable[[Path], None], killed: Runs, tmp_path: Path) -> None:
    run = killed(UNTYING, 21, tmp_path / "run")
    damage(tmp_path / "run/checkpoints")
    before = files(tmp_path / "run")
    with pytest.raises(UserError, match=f"^{tmp_path / 'run/checkpoints'}"):
        train(run)
    assert files(tmp_path / "run") == before


# --- what is refused


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("optim.warmup_steps", {"optim": OptimConfig(warmup_steps=6)}),
        ("seed", {"seed": 5, "checkpoint": CheckpointConfig(resume=False)}),
        ("data_hash", {}),  # of another text
    ],
)
def test_another_run_is_refused(key: str, changes: dict[str, Any], killed: Runs, tmp_path: Path) -> None:
    run = change(killed(UNTIED, 21, tmp_path / "run"), **changes)
    if key == "data_hash":
        (tmp_path / "text").write_text(Path(str(run.data.path)).read_text() + "one line more\n")
        run = replace(run, data=replace(run.data, path=str(tmp_path / "text")))
    before = files(tmp_path / "run")
    with pytest.raises(UserError, match=rf"{key} is ") as caught:
        train(run)
    assert "\n" not in str(caught.value)
    assert files(tmp_path / "run") == before


def test_a_second_process_is_refused_until_the_first_one_is_dead(text_file: Path, tmp_path: Path) -> None:
    run = small(text_file, tmp_path / "run", max_steps=100_000)
    process = spawn(run)
    wait_for(lambda: checkpoints(run))
    os.kill(process.pid, signal.SIGSTOP)  # it keeps its lock, and leaves the core to the other one
    assert finish(run) == 2
    assert (tmp_path / "run.refused").read_text().startswith(f"run_dir={run.run_dir}: ")
    process.kill()
    process.join()
    stop(run, checkpoints(run)[-1] + 1, KILL)
