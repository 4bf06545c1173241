"""A run that is stopped, killed and resumed ends with the same numbers, bit for bit, as an undisturbed one."""

import math
import os
import resource
import shutil
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from unittest.mock import Mock

import pytest
import torch
from conftest import HEADS, some

import lm.training.state
import lm.training.train
from lm.config import CheckpointConfig, DiagnosticsConfig, ValidationConfig
from lm.data.tokens import prepare
from lm.errors import UserError
from lm.folder import load_model, read_weights
from lm.scoring import validate
from lm.training.run_directory import RunLocked
from lm.training.state import best_files, newest_checkpoint, step_of
from lm.training.train import train
from tests.helpers.runs import (
    MUON,
    change,
    checkpoints,
    compiles,
    composed,
    files,
    kill,
    outcome,
    overfitting_run,
    result,
    rows,
    set_environment,
    small_run,
    spawn,
    stop,
    wait_for,
)

EVERY_FIVE = CheckpointConfig(every=5, keep=3)
MIDTRAINING = replace(HEADS["untied_midtraining"], head_lr_multiplier=0.5)
ADAMW, BEST, COMPILED = "AdamW and smoothed targets", "Muon, bf16, the best average, patience", "compiled"
VARIANTS = {  # each has dropout and accumulation, and is untied before step 13
    ADAMW: {"ngram_smoothing": 0.5, "diagnostics": DiagnosticsConfig(every=3), "gradient_clip_val": 1.3},
    BEST: {
        "optim": replace(MUON, lr=0.05, adam_lr=0.03, warmup_steps=2, decay="constant", ema=0.5),
        "checkpoint": replace(EVERY_FIVE, best=True, patience=5),
        "precision": "bf16-mixed",
        "prompts": ["def "],
    },
    COMPILED: {"optim": replace(MUON, ema=0.5), "compile": True},
}


def small(text, run_dir, **changes):
    """Twenty-four logged steps."""
    settings = {"head": MIDTRAINING, "max_steps": 24, "log_every_n_steps": 1, "checkpoint": EVERY_FIVE}
    return small_run(text, run_dir, **{**settings, **changes})


@pytest.fixture(scope="module")
def whole(text_file, tmp_path_factory):
    """The undisturbed run of a variant."""

    @cache
    def run_of(variant):
        begun = overfitting_run if variant == BEST else small
        run = begun(text_file, tmp_path_factory.mktemp("whole") / "run", head=MIDTRAINING, **VARIANTS[variant])
        train(run)
        return run

    return run_of


@pytest.fixture(scope="module")
def left(whole, tmp_path_factory):
    """A copy of the run of a variant as SIGTERM left it after step 12 and then SIGKILL after step 21."""

    @cache
    def stopped(variant):
        run = change(whole(variant), run_dir=str(tmp_path_factory.mktemp("left") / "run"))
        stop(run, 12)
        kill(run, 21)
        return run.run_dir

    def copied(variant, folder):
        shutil.copytree(stopped(variant), folder)
        return change(whole(variant), run_dir=str(folder))

    return copied


# --- stopped and resumed


@pytest.mark.parametrize(
    "variant",
    [
        ADAMW,
        pytest.param(BEST, marks=pytest.mark.nightly),
        pytest.param(COMPILED, marks=[pytest.mark.nightly, compiles]),
    ],
)
def test_a_run_stopped_twice_ends_as_an_undisturbed_one(whole, left, tmp_path, variant):
    """A kill at any operation of a run: tests/test_files.py, nightly."""
    run = left(variant, tmp_path / "run")
    _, scores = train(run)
    assert outcome(run) == outcome(whole(variant))
    assert scores["resumed_from"] == [12, 20]
    assert (scores["steps"], scores["ended_by"]) == ((22, "patience") if variant == BEST else (24, "steps"))
    assert [int(row["step"]) for row in rows(tmp_path / "run")] == list(range(1, scores["steps"] + 1))
    assert not list((tmp_path / "run").rglob(".partial*"))


def other_weights(*args):
    return {name: tensor + 1e-6 for name, tensor in read_weights(*args).items()}


def moments(checkpoint):
    return checkpoint["optimizer"]["state"]


CONTROLS = [  # how to break a resume: a change of the checkpoint, or a patch
    (ADAMW, lambda checkpoint: [state["exp_avg"].zero_() for state in moments(checkpoint).values()]),
    (ADAMW, lambda checkpoint: checkpoint["optimizer"]["param_groups"][0].update(peak_lr=0.1)),
    (ADAMW, lambda checkpoint: checkpoint["net"]["norm.weight"].add_(1e-6)),
    (ADAMW, lambda checkpoint: checkpoint.update(n_clipped=0)),
    (ADAMW, lambda checkpoint: moments(checkpoint).pop(max(moments(checkpoint)))),  # it unties a second time
    (ADAMW, (lm.training.train, "named_seed", lambda *_: 1)),  # of dropout
    (BEST, lambda checkpoint: checkpoint.update(best_step=0, best_loss=math.inf, best_sha256="")),
    (BEST, lambda checkpoint: checkpoint.update(average=checkpoint["net"])),
    (BEST, (lm.training.state, "read_weights", other_weights)),
]


@pytest.mark.parametrize(("variant", "broken"), some(CONTROLS, 5))
def test_the_comparison_sees_what_a_resume_forgets(whole, left, tmp_path, variant, broken, monkeypatch):
    run = left(variant, tmp_path / "run")

    def changed(*args):
        checkpoint = newest_checkpoint(*args)
        broken(checkpoint)
        return checkpoint

    monkeypatch.setattr(*(broken if isinstance(broken, tuple) else (lm.training.train, "newest_checkpoint", changed)))
    train(run)
    assert outcome(run) != outcome(whole(variant))
    assert result(tmp_path / "run")["resumed_from"] == [12, 20]


@pytest.mark.parametrize(("restarts", "resumed_from"), some([("0", []), ("1", [12, 20])], 2))
def test_without_resume_a_run_starts_again_once(restarts, resumed_from, whole, left, tmp_path, monkeypatch):
    """Not where torchrun starts it again; and no command that follows does it, for it is not saved."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    run = left(ADAMW, tmp_path / "run")
    (tmp_path / "run/samples.jsonl").write_text('{"step": 5, "samples": []}\n')  # of the attempt before
    train(replace(run, checkpoint=CheckpointConfig(every=10, resume=False)))
    assert (tmp_path / "run/samples.jsonl").exists() == bool(resumed_from)
    assert result(tmp_path / "run")["resumed_from"] == resumed_from
    assert outcome(run) == outcome(whole(ADAMW))
    again = composed(f"run_dir={tmp_path / 'run'}")
    assert (again.checkpoint.resume, again.checkpoint.every) == (True, 10)


def test_an_interrupt_after_the_result_leaves_its_model(text_file, tmp_path, monkeypatch):
    """Which is that of the last step, though an estimate before it was lower than those that followed."""
    settings = {"checkpoint": CheckpointConfig(best=True), "validation": ValidationConfig(every=3, batches=1)}
    run = small(text_file, tmp_path / "run", max_steps=8, **settings)
    write = lm.training.train.write_json
    interrupted = lambda *args: (write(*args), os.kill(os.getpid(), signal.SIGINT))  # noqa: E731
    monkeypatch.setattr(lm.training.train, "write_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    _, scores = train(run)
    assert scores["best"] == {"step": 8, "val_loss": scores["val_loss"], "last_val_loss": scores["val_loss"]}
    model, _ = load_model(tmp_path / "run")
    assert validate(model, run, prepare(run.data, run.tokenizer)).loss == scores["val_loss"]


def test_a_checkpoint_that_memory_does_not_hold_is_not_damaged(tmp_path, monkeypatch):
    """Otherwise the advice would be to delete it."""
    (tmp_path / "step-00000003.ckpt").touch()
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        monkeypatch.setattr(lm.training.state, "_read_whole", Mock(side_effect=error))
        with pytest.raises(type(error)):
            newest_checkpoint(tmp_path, "")


# --- within a step


def disturbed_run(text, folder, layer):
    """A run whose linear class disturbs its fifth step, and the environment that says so."""
    run = small(text, folder / "run", checkpoint=CheckpointConfig(every=3), max_steps=12)
    n_layers, n_projections, micro_batches = 2, 6, 2
    call = n_layers * n_projections * (4 * micro_batches + 1) + 5
    environment = {"DISTURBED_CALL": str(call), "DISTURBED_FILE": str(folder / "disturbed")}
    return replace(run, model=replace(run.model, linear=f"tests.helpers.layers.{layer}")), environment


def test_an_error_within_a_step_saves_nothing(text_file, tmp_path, monkeypatch):
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
    [([signal.SIGINT], 0.5), pytest.param([signal.SIGTERM, signal.SIGHUP], 2, marks=pytest.mark.nightly)],
)
def test_signals_of_one_shutdown_are_one_and_a_later_one_ends_a_run_at_once(shutdown, seconds, text_file, tmp_path):
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


# --- checkpoints


@contextmanager
def disk_of(n_bytes):
    """No file can grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_loses_nothing(whole, left, tmp_path):
    """Also where torch reports the error of the file as its own, which it does but for the last bytes of a file."""
    run = left(ADAMW, tmp_path / "run")
    before = checkpoints(run)
    for n_bytes in (20_000, 50_000):
        with disk_of(n_bytes), pytest.raises(OSError, match="too large"):
            train(run)
    assert checkpoints(run) == before
    assert not list((tmp_path / "run").rglob(".partial*"))
    train(run)
    assert outcome(run) == outcome(whole(ADAMW))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip_a_bit_of_a_weight(path):
    content = bytearray(path.read_bytes())
    weight = torch.load(path, weights_only=True)["net"]["embed.weight"].numpy().tobytes()
    content[content.index(weight) + 400] ^= 64
    path.write_bytes(content)


def test_checkpoints_that_are_not_whole_are_skipped_with_a_warning(whole, left, tmp_path, caplog):
    run, folder = left(ADAMW, tmp_path / "run"), tmp_path / "run/checkpoints"
    assert checkpoints(run) == [12, 15, 20]
    damaged = [folder / f"step-000000{step}.ckpt" for step in (20, 15)]
    shutil.copy(damaged[0], folder / "step-00000023 (copy).ckpt")
    flip_a_bit_of_a_weight(damaged[0])
    cut(damaged[1])
    train(run)
    warnings = [record.getMessage() for record in caplog.records if "trying the one before" in record.getMessage()]
    assert [warning.partition(": ")[0] for warning in warnings] == [str(path) for path in damaged]
    assert outcome(run) == outcome(whole(ADAMW))
    assert result(tmp_path / "run")["resumed_from"] == [12]


@pytest.mark.nightly
def test_each_checkpoint_has_its_best_weights(whole, left, tmp_path):
    """Also the one before the newest, with which a run goes on that has lost the newest."""
    run, folder = left(BEST, tmp_path / "run"), tmp_path / "run/checkpoints"
    named = {torch.load(path, weights_only=True)["best_step"] for path in folder.glob("step-*")}
    assert {step_of(path) for path in best_files(folder)} == named, "and no older ones"
    cut(folder / "step-00000020.ckpt")
    later = folder / "best-00000021.safetensors"  # than the state that is resumed
    later.touch()
    train(run)
    assert outcome(run) == outcome(whole(BEST))
    assert result(tmp_path / "run")["resumed_from"] == [12, 15]
    assert not later.exists()


def cut_all(folder):
    for path in folder.iterdir():
        cut(path)


def add_one_of_another_run(folder):
    content = torch.load(folder / "step-00000020.ckpt", weights_only=True)
    torch.save(content | {"config_hash": "another"}, folder / "step-00000021.ckpt")


@pytest.mark.parametrize("damage", [cut_all, add_one_of_another_run])
def test_checkpoints_of_no_use_are_refused(damage, left, tmp_path):
    run = left(ADAMW, tmp_path / "run")
    damage(tmp_path / "run/checkpoints")
    before = files(tmp_path / "run")
    with pytest.raises(UserError, match=f"^{tmp_path / 'run/checkpoints'}"):
        train(run)
    assert files(tmp_path / "run") == before


def test_a_second_process_is_refused_until_the_first_one_is_dead(text_file, tmp_path):
    run = small(text_file, tmp_path / "run", max_steps=100_000)
    process = spawn(run)
    wait_for(lambda: checkpoints(run))
    os.kill(process.pid, signal.SIGSTOP)  # it keeps its lock, and leaves the core to this one
    with pytest.raises(RunLocked, match=f"^run_dir={run.run_dir}: "):
        train(run)
    process.kill()
    process.join()
    stop(run, checkpoints(run)[-1] + 1)
