"""A run that is stopped, killed and resumed ends with the same numbers, bit for bit, in a folder that is its own."""

import errno
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml

import lm.training.state
import lm.training.train
from lm.config import CheckpointConfig, DiagnosticsConfig, OptimConfig
from lm.errors import reading
from lm.folder import load_model
from lm.lab.init_from.base import read_base
from lm.system.files import atomic_file, is_run, read_json, read_yaml
from lm.training.run_directory import RunLocked
from lm.training.state import newest_checkpoint
from lm.training.train import train
from tests.helpers import ROOT
from tests.helpers.cases import some
from tests.helpers.limits import small_disk
from tests.helpers.models import weights
from tests.helpers.refusals import refused
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
    set_environment,
    short_run,
    small_run,
    spawn,
    stop,
    wait_for,
)
from tests.helpers.tiny import HEADS, TEXT

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
        "seed": 2,  # others have their best validation earlier, and end before step 21
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
    """A kill at any operation of a run: the fault campaign below."""
    run = left(variant, tmp_path / "run")
    _, scores = train(run)
    assert outcome(run) == outcome(whole(variant))
    assert scores["resumed_from"] == [12, 20]
    assert (scores["steps"], scores["ended_by"]) == ((22, "patience") if variant == BEST else (24, "steps"))
    assert not list((tmp_path / "run").rglob(".partial*"))


def moments(checkpoint):
    return checkpoint["optimizer"]["state"]


CONTROLS = [  # how to break a resume: a change of the checkpoint, or a patch
    (ADAMW, lambda checkpoint: [state["exp_avg"].zero_() for state in moments(checkpoint).values()]),
    (ADAMW, lambda checkpoint: checkpoint["optimizer"]["param_groups"][0].update(peak_lr=0.1)),
    (ADAMW, lambda checkpoint: checkpoint["net"]["norm.weight"].add_(1e-6)),
    (ADAMW, lambda checkpoint: moments(checkpoint).pop(max(moments(checkpoint)))),  # it unties a second time
    (ADAMW, (lm.training.train, "named_seed", lambda *_: 1)),  # of dropout
    (BEST, lambda checkpoint: checkpoint.update(best_step=0, best_loss=math.inf, best=None)),
    (BEST, lambda checkpoint: checkpoint.update(average=checkpoint["net"])),
    (BEST, lambda checkpoint: checkpoint["best"]["norm.weight"].add_(1)),
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
    (tmp_path / "run/samples.jsonl").unlink(missing_ok=True)
    assert result(tmp_path / "run")["resumed_from"] == resumed_from
    assert outcome(run) == outcome(whole(ADAMW))
    again = composed(f"run_dir={tmp_path / 'run'}")
    assert (again.checkpoint.resume, again.checkpoint.every) == (True, 10)


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


def test_a_full_disk_loses_nothing(whole, left, tmp_path):
    """Also where torch reports the error of the file as its own, which it does but for the last bytes of a file."""
    run = left(ADAMW, tmp_path / "run")
    before = checkpoints(run)
    for n_bytes in (20_000, 50_000):
        with small_disk(n_bytes), pytest.raises(OSError, match="too large"):
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


def cut_all(folder):
    for path in folder.iterdir():
        cut(path)


def add_one_of_another_run(folder):
    content = torch.load(folder / "step-00000020.ckpt", weights_only=True)
    torch.save(content | {"config_hash": "another"}, folder / "step-00000021.ckpt")


def remove_the_settings(folder):
    (folder.parent / "config.yaml").unlink()


@pytest.mark.parametrize("damage", [cut_all, add_one_of_another_run, remove_the_settings])
def test_checkpoints_of_no_use_are_refused(damage, left, tmp_path):
    run = left(ADAMW, tmp_path / "run")
    damage(tmp_path / "run/checkpoints")
    before = files(tmp_path / "run")
    with refused(f"^{tmp_path / 'run'}/.*: "):
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


# --- whose folder a run directory is, and which code made a run


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "baseURL: https://x/\ntitle: My site\n"),
        ("config.yaml", "model: {n_layers: 3}\ndata: {path: a}\n"),
        ("notes.txt", "mine"),
    ],
)
def test_what_lies_in_the_place_of_the_directory_is_refused_and_never_touched(name, content, tmp_path, monkeypatch):
    """A folder of another program or of a person, and the text itself."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    Path("my.txt").write_text(TEXT)
    before = files(tmp_path)
    for run_dir in (".", "my.txt"):
        with refused(f"^run_dir={run_dir}: "):
            train(composed("data=text", "data.path=my.txt", "tokenizer=byte", f"run_dir={run_dir}"))
    assert files(tmp_path) == before
    assert not is_run(tmp_path)


def test_a_run_says_which_code_made_it_and_other_code_does_not_continue_it(text_file, tmp_path, monkeypatch, caplog):
    run = short_run(text_file, tmp_path / "run")
    stop(run, 12)
    code = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["code"]
    other = {"version": "9.9.9", "hash": "0" * 64}
    monkeypatch.setattr("lm.training.run_directory.code_identity", lambda: other)
    with refused(r"was begun by other code.*checkpoint\.resume=false.*other_code=true"):
        train(run)
    train(replace(run, other_code=True))
    assert result(tmp_path / "run")["code"] == other != code
    monkeypatch.undo()
    assert train(run)[1]["code"] == other
    assert "was made by other code (version 9.9.9)" in caplog.text


CLASS = """
import torch
from torch import nn
from lm import Linear

from factor_of_mine import FACTOR

class Own(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj = Linear(config.d_model, config.d_ff)
        self.down_proj = Linear(config.d_ff, config.d_model)
        self.register_buffer("n", torch.tensor(0))
        self.register_buffer("one", torch.tensor(1.0))

    def forward(self, x):
        self.n += self.training
        return FACTOR * self.one * self.down_proj(self.up_proj(x).relu())
"""


def test_a_class_of_the_user_is_averaged_adapted_and_is_code(text_file, tmp_path, monkeypatch, caplog):
    """Its counter is that of the trained model, its tensors may lie in no file, its code is hashed."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "counts_of_mine.py").write_text(CLASS)
    (tmp_path / "factor_of_mine.py").write_text("FACTOR = 1.0\n")
    run = short_run(text_file, tmp_path / "run", max_steps=6, optim=OptimConfig(ema=0.5, warmup_steps=2))
    run = replace(run, model=replace(run.model, ffn="counts_of_mine.Own"))
    train(run)
    assert weights(tmp_path / "run")["blocks.0.ffn.n"] == 6
    adapted = replace(run, model=replace(run.model, linear="lora"), init_from=run.run_dir)
    adapted = replace(adapted, tokenizer=read_base(run.run_dir).tokenizer, run_dir=str(tmp_path / "adapted"))
    assert train(adapted)[1]["val_loss"] > 0
    stopped = replace(run, run_dir=str(tmp_path / "stopped"))
    stop(stopped, 3)
    load_model(run.run_dir, classes=["counts_of_mine.Own"])
    assert "another version" not in caplog.text
    (tmp_path / "factor_of_mine.py").write_text("FACTOR = 2.0\n")  # which the class imports
    with refused(r"was begun by another version of counts_of_mine\.Own"):
        train(stopped)
    load_model(run.run_dir, classes=["counts_of_mine.Own"])
    assert f"{run.run_dir}: was trained with another version of model.ffn=counts_of_mine.Own" in caplog.text
    (tmp_path / "counts_of_mine.py").unlink()
    monkeypatch.delitem(sys.modules, "counts_of_mine")
    assert train(run)[1]["steps"] == 6, "a finished run is shown without its class"


def test_the_defaults_of_torch_that_a_notebook_has_set_change_no_run_and_no_model(text_file, tmp_path):
    run, losses = short_run(text_file, tmp_path / "run", max_steps=2), []
    for dtype, records in ((torch.float32, True), (torch.float64, False)):
        torch.set_default_dtype(dtype)
        try:
            state = torch.get_rng_state()
            with torch.set_grad_enabled(records):
                folder, scores = train(replace(run, run_dir=str(tmp_path / f"{dtype}")))
                net, _ = load_model(folder)
            assert torch.get_default_dtype() == dtype
            assert torch.equal(torch.get_rng_state(), state), "the notebook draws what it would have drawn"
        finally:
            torch.set_default_dtype(torch.float32)
        assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
        losses.append(scores["val_loss"])
    assert losses[0] == losses[1]


def test_settings_of_python_are_checked_as_those_of_a_file_are(text_file, tmp_path):
    run = small_run(text_file, tmp_path / "run")
    for wrong, key in (({"max_steps": 2.5}, "trainer.max_steps"), ({"prompts": "Once"}, "prompts")):
        with refused(f"^{key}: "):
            train(change(run, **wrong))
    run = change(run, optim=replace(run.optim, betas=(0.9, 0.95)), max_steps=2)
    assert train(run) == train(run), "a tuple is a list"


def test_what_was_decided_before_the_first_checkpoint_stays_and_what_was_left_goes(text_file, tmp_path, monkeypatch):
    """A run of minutes that is killed at once keeps its number of steps; the model of another attempt does not stay."""
    run = short_run(text_file, tmp_path / "run", max_minutes=0.02)
    for seconds in (0.1, 0.2):
        monkeypatch.setattr("lm.lab.measures.speed.seconds_per_step", lambda run, data, seconds=seconds: seconds)
        with monkeypatch.context() as patch:
            patch.setattr("lm.training.train.fit", Mock(side_effect=RuntimeError("a power failure")))
            with pytest.raises(RuntimeError, match="a power failure"):
                train(run)
        assert not (tmp_path / "run/model").exists()
        (tmp_path / "run/model").mkdir()
        (tmp_path / "run/model/model.safetensors").touch()
    assert train(run)[1]["steps"] == 12


# --- files that are whole, whatever fails while they are written


@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_what_holds_something_else_is_named(tmp_path, read):
    path = tmp_path / "file"
    for content in (b"", b"[1, 2]", b"{", b"\xff", b"a: !!python/name:os.system"):
        path.write_bytes(content)
        with refused(rf"^{path}: not what lm wrote \("), reading(path):
            read(path)


def test_an_error_names_the_file_whatever_raises_it(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    with pytest.raises(OSError, match="No space left") as caught, small_disk(), atomic_file(path) as file:
        np.zeros(10_000).tofile(file)  # its error has no number
    assert (caught.value.errno, caught.value.filename, os.listdir(tmp_path)) == (errno.ENOSPC, str(path), [])

    def read_only(*given, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "temporary")

    monkeypatch.setattr("builtins.open", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(OSError, match="Read-only") as caught, atomic_file(path):
        pass
    assert caught.value.filename == str(path)


@pytest.mark.nightly
def test_the_fault_campaign_finds_no_defect():
    command = [sys.executable, "-m", "scripts.faults", "minutes=5"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert answer.returncode == 0, answer.stdout + answer.stderr
