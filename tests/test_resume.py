"""A run that is killed and resumed ends with the same numbers, bit for bit, as an undisturbed one."""

import errno
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.config import CheckpointConfig, DiagnosticsConfig, HeadConfig, OptimConfig, RunConfig, UserError
from lm.training.train import train
from tests.helpers.runs import (
    MUON,
    change,
    checkpoints,
    exit_code,
    finish,
    outcome,
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


@pytest.fixture(scope="module")
def undisturbed(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    run = small_run(text_file, tmp_path_factory.mktemp("whole") / "run")
    assert finish(run) == 0
    return run


def kill_at_random(run: RunConfig, kills: int, seed: int) -> None:
    """kill -9 at random times, each shortly after a new checkpoint."""
    moments = random.Random(seed)
    for _ in range(kills):
        before, process = checkpoints(run), spawn(run)
        wait_for(lambda before=before, process=process: checkpoints(run) != before or process.exitcode is not None)
        time.sleep(moments.uniform(0, 0.15))
        process.kill()
        process.join()


def stop(run: RunConfig, step: int, signum: signal.Signals) -> None:
    assert finish(run, partial(signal_at, step, signum)) == exit_code(signum)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("[!.]*") if path.is_file()}


# --- stopped and resumed


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_run_killed_at_random_ends_as_an_undisturbed_one(
    undisturbed: RunConfig, text_file: Path, tmp_path: Path, seed: int
) -> None:
    run = small_run(text_file, tmp_path / "run")
    kill_at_random(run, kills=3, seed=seed)
    assert finish(run) == 0
    assert outcome(run) == outcome(undisturbed)
    assert result(tmp_path / "run")["resumed_from"]
    assert not list((tmp_path / "run").rglob(".partial*"))


VARIANTS: dict[str, dict[str, Any]] = {  # each is also a run with dropout and accumulation
    "tied, Muon, bf16": {"head": HeadConfig(embedding_std=0.02), "optim": MUON, "precision": "bf16-mixed"},
    "untied, AdamW, diagnostics": {"diagnostics": DiagnosticsConfig(every=3), "gradient_clip_val": 1.85},
    "untied in mid-training, AdamW": {"head": MIDTRAINING},
    "untied in mid-training, Muon, diagnostics, samples": {
        "head": MIDTRAINING,
        "optim": MUON,
        "diagnostics": DiagnosticsConfig(every=3),
        "prompts": ["def "],
    },
}


@pytest.fixture(scope="module")
def whole(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunConfig]:
    """The undisturbed run of a variant. A head that is untied in mid-training is so before step 21 of 40."""
    ended: dict[str, RunConfig] = {}

    def run_of(variant: str) -> RunConfig:
        if variant not in ended:
            folder = tmp_path_factory.mktemp("whole") / "run"
            run = small_run(text_file, folder, max_steps=40, log_every_n_steps=1, **VARIANTS[variant])
            assert finish(run) == 0
            ended[variant] = run
        return ended[variant]

    return run_of


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("signum", "stops", "resumed_from"), [(KILL, [20, 21, 35], [10, 20, 30]), (TERM, [19, 20, 21], [19, 20, 21])]
)
def test_a_run_stopped_before_at_and_after_untying_ends_as_an_undisturbed_one(
    whole: Callable[[str], RunConfig],
    tmp_path: Path,
    variant: str,
    signum: signal.Signals,
    stops: list[int],
    resumed_from: list[int],
) -> None:
    run = change(whole(variant), run_dir=str(tmp_path / "run"))
    for step in stops:
        stop(run, step, signum)
    assert finish(run) == 0
    assert outcome(run) == outcome(whole(variant))
    assert result(tmp_path / "run")["resumed_from"] == resumed_from
    assert [int(row["step"]) for row in rows(tmp_path / "run")] == list(range(1, 41))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_a_checkpoint_and_sets_the_exit_code(
    undisturbed: RunConfig, text_file: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    run, metrics = small_run(text_file, tmp_path / "run", checkpoint=CheckpointConfig(every=10_000)), tmp_path / "run"
    process = spawn(run)
    wait_for(lambda: (metrics / "metrics.csv").exists() and rows(metrics))
    os.kill(process.pid, signum)
    process.join(60)
    assert process.exitcode == 128 + signum
    assert len(checkpoints(run)) == 1
    assert (tmp_path / "run/model/model.safetensors").exists()
    assert not (tmp_path / "run/result.json").exists()
    assert finish(run) == 0
    assert outcome(run) == outcome(undisturbed)


def signal_at_final_score(signum: int) -> None:
    import lm.training.train as module

    evaluate = module.evaluate

    def signalled(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signum)
        return evaluate(*args, **options)

    module.evaluate = signalled  # type: ignore[assignment]


@pytest.mark.parametrize("signum", [signal.SIGINT, KILL])
def test_a_run_stopped_at_its_final_score_only_scores_again(
    undisturbed: RunConfig, text_file: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    run = small_run(text_file, tmp_path / "run")
    assert finish(run, partial(signal_at_final_score, signum)) == (-KILL if signum == KILL else 1)
    assert checkpoints(run)[-1] == 120
    assert rows(tmp_path / "run")[-1]["step"] == "119"
    assert finish(run) == 0
    assert outcome(run) == outcome(undisturbed)
    assert result(tmp_path / "run")["resumed_from"] == [120]


def signal_before_the_first_step() -> None:
    from lm.training.module import LMModule

    configure = LMModule.configure_optimizers

    def configure_optimizers(module: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return configure(module)

    LMModule.configure_optimizers = configure_optimizers  # type: ignore[method-assign]


def test_a_run_stopped_before_its_first_step_ends_as_an_undisturbed_one(
    undisturbed: RunConfig, text_file: Path, tmp_path: Path
) -> None:
    run = small_run(text_file, tmp_path / "run")
    assert [finish(run, signal_before_the_first_step) for _ in range(2)] == [143, 143]
    assert finish(run) == 0
    assert outcome(run) == outcome(undisturbed)


# --- within a step


def disturbed_run(text: Path, folder: Path, layer: str) -> tuple[RunConfig, Callable[[], None]]:
    """A run whose linear class disturbs its fifth step, and what the process that trains it calls first."""
    run = small_run(text, folder / "run", checkpoint=CheckpointConfig(every=3), max_steps=12)
    n_layers, n_projections, micro_batches = 2, 6, 2
    call = n_layers * n_projections * (4 * micro_batches + 1) + 5
    before = partial(set_environment, DISTURBED_CALL=str(call), DISTURBED_FILE=str(folder / "disturbed"))
    return replace(run, model=replace(run.model, linear=f"tests.helpers.layers.{layer}")), before


UNDISTURBED = partial(set_environment, DISTURBED_CALL="never")


@pytest.mark.parametrize("layer", ["Raising", "Signalling"])
def test_an_error_within_a_step_saves_nothing(layer: str, text_file: Path, tmp_path: Path) -> None:
    """Also where a signal has arrived in the step; the error is what is reported."""
    run, before = disturbed_run(text_file, tmp_path, layer)
    assert finish(run, before) == 1
    assert checkpoints(run) == [3]
    assert not (tmp_path / "run/model").exists()
    assert finish(run, UNDISTURBED) == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_at_once_also_in_one_long_operation(
    signum: signal.Signals, text_file: Path, tmp_path: Path
) -> None:
    run, before = disturbed_run(text_file, tmp_path, "Long")
    process = spawn(run, before)
    wait_for((tmp_path / "disturbed").exists)
    os.kill(process.pid, signum)
    time.sleep(0.5)
    assert process.is_alive()
    os.kill(process.pid, signum)
    process.join(10)
    assert process.exitcode == 128 + signum
    assert checkpoints(run) == [3]
    assert not (tmp_path / "run/model").exists()
    assert finish(run, UNDISTURBED) == 0


@pytest.mark.parametrize("signum", [None, signal.SIGTERM])
def test_a_step_that_is_not_finite_is_not_saved(signum: signal.Signals | None, text_file: Path, tmp_path: Path) -> None:
    """Nor where a signal ends the run after it, before the loss is looked at."""
    optim, every = OptimConfig(lr=1e15, warmup_steps=0), CheckpointConfig(every=1 if signum is None else 100, keep=100)
    run = small_run(text_file, tmp_path / "run", optim=optim, checkpoint=every, gradient_clip_val=None)
    run = change(run, log_every_n_steps=100)
    assert finish(run, partial(signal_at, 9, signum) if signum else None) == 2
    for path in tmp_path.glob("run/checkpoints/*"):
        weights = torch.load(path, weights_only=True)["state_dict"]
        assert all(tensor.isfinite().all() for tensor in weights.values())
    assert not (tmp_path / "run/model").exists()


# --- the comparison sees a resume that forgets one thing


def on_load(change: Callable[[dict[str, Any]], object]) -> None:
    """Let this process change what it reads from a checkpoint."""
    from lm.training.checkpoint import AtomicCheckpointIO

    load = AtomicCheckpointIO.load_checkpoint

    def load_checkpoint(*args: Any, **options: Any) -> dict[str, Any]:
        checkpoint = load(*args, **options)
        change(checkpoint)
        return checkpoint

    AtomicCheckpointIO.load_checkpoint = load_checkpoint  # type: ignore[method-assign]


def break_nothing(checkpoint: dict[str, Any]) -> None:
    pass


def break_optimizer(checkpoint: dict[str, Any]) -> None:
    for state in checkpoint["optimizer_states"][0]["state"].values():
        state["exp_avg"].zero_()


def break_position(checkpoint: dict[str, Any]) -> None:
    import lm.training.module as module

    class FromTheStart(module.TrainingStream):
        def __init__(self, tokens: Any, **options: Any) -> None:
            super().__init__(tokens, **{**options, "start": 0})

    module.TrainingStream = FromTheStart  # type: ignore[misc]


def break_schedule(checkpoint: dict[str, Any]) -> None:
    checkpoint["lr_schedulers"][0]["last_epoch"] = 0


def break_weights(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["net.norm.weight"] += 1e-6


def break_dropout(checkpoint: dict[str, Any]) -> None:
    import lm.training.module as module

    module.named_seed = lambda *_: 1


def break_diagnostics(checkpoint: dict[str, Any]) -> None:
    checkpoint["callbacks"]["Diagnostics"]["steps"] = 0


def break_moments(checkpoint: dict[str, Any]) -> None:
    """Untie without the moments of the embedding."""
    from lm.model.head import UntiedMidTrainingHead

    on_train_step = UntiedMidTrainingHead.on_train_step

    def forgetful(head: Any, progress: float, embedding: Any, state: Any) -> None:
        on_train_step(head, progress, embedding, {key: value for key, value in state.items() if key is not embedding})

    UntiedMidTrainingHead.on_train_step = forgetful  # type: ignore[method-assign]


def break_untying(checkpoint: dict[str, Any]) -> None:
    """Untie a second time: the optimizer has no state of the head, whose group is the last one."""
    moments = checkpoint["optimizer_states"][0]["state"]
    del moments[max(moments)]


@pytest.mark.parametrize(
    ("variant", "step", "change_checkpoint"),
    [
        *(
            ("untied, AdamW, diagnostics", 31, change)
            for change in (break_optimizer, break_position, break_schedule, break_weights, break_dropout)
        ),
        ("untied, AdamW, diagnostics", 27, break_diagnostics),
        ("untied in mid-training, AdamW", 20, break_moments),
        ("untied in mid-training, AdamW", 30, break_untying),
    ],
)
def test_the_comparison_sees_what_a_resume_forgets(
    whole: Callable[[str], RunConfig], tmp_path: Path, variant: str, step: int, change_checkpoint: Callable[..., None]
) -> None:
    run = change(whole(variant), run_dir=str(tmp_path / "run"), checkpoint=CheckpointConfig(every=5))
    stop(run, step, KILL)
    shutil.copytree(tmp_path / "run", tmp_path / "control")
    control = change(run, run_dir=str(tmp_path / "control"))
    for resumed, how, is_equal in ((control, break_nothing, True), (run, change_checkpoint, False)):
        assert finish(resumed, partial(on_load, how)) == 0
        assert (outcome(resumed) == outcome(whole(variant))) == is_equal


# --- checkpoints


def test_without_resume_a_run_starts_again(undisturbed: RunConfig, text_file: Path, tmp_path: Path) -> None:
    run = small_run(text_file, tmp_path / "run")
    kill_at_random(run, kills=1, seed=0)
    assert finish(replace(run, checkpoint=CheckpointConfig(every=10, resume=False))) == 0
    assert result(tmp_path / "run")["resumed_from"] == []
    assert outcome(run) == outcome(undisturbed)


def test_a_full_disk_loses_nothing(undisturbed: RunConfig, text_file: Path, tmp_path: Path) -> None:
    """Also where torch reports the error of the file as its own, which it does but for the last bytes of a file."""
    run = small_run(text_file, tmp_path / "run")
    kill_at_random(run, kills=1, seed=0)
    before = checkpoints(run)
    assert [finish(run, file_size=size) for size in (20_000, 50_000)] == [74, 74]
    assert checkpoints(run) == before
    assert not list((tmp_path / "run").rglob(".partial*"))
    assert finish(run) == 0
    assert outcome(run) == outcome(undisturbed)


def without_permission() -> None:
    """As for who may not read the folder of checkpoints, also for root."""

    def refusing(read: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any = ".") -> Any:
            if not isinstance(path, int) and Path(path).name == "checkpoints":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return read(path)

        return refuse

    os.listdir, os.scandir = refusing(os.listdir), refusing(os.scandir)  # type: ignore[assignment]


def test_checkpoints_that_cannot_be_listed_are_not_absent(
    undisturbed: RunConfig, text_file: Path, tmp_path: Path
) -> None:
    run = small_run(text_file, tmp_path / "run")
    kill_at_random(run, kills=1, seed=0)
    folder, moved = tmp_path / "run/checkpoints", tmp_path / "moved"
    before = files(tmp_path / "run")
    assert finish(run, without_permission) == 74
    folder.rename(moved)
    for put_in_its_place in (folder.touch, lambda: folder.symlink_to("absent")):
        put_in_its_place()
        assert finish(run) == 74
        folder.unlink()
    moved.rename(folder)
    assert files(tmp_path / "run") == before
    assert finish(run) == 0
    assert outcome(run) == outcome(undisturbed)


@pytest.mark.parametrize("length", [0, 1000, -1000])
def test_a_checkpoint_that_is_cut_off_is_skipped_with_a_warning(
    length: int, whole: Callable[[str], RunConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    variant = "untied in mid-training, AdamW"
    run = change(whole(variant), run_dir=str(tmp_path / "run"))
    stop(run, 25, KILL)
    newest = tmp_path / "run/checkpoints/step-00000020.ckpt"
    newest.write_bytes(newest.read_bytes()[:length])
    train(run)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert str(newest) in warning
    assert outcome(run) == outcome(whole(variant))
    assert result(tmp_path / "run")["resumed_from"] == [10]


def test_only_checkpoints_that_are_cut_off_are_an_error(whole: Callable[[str], RunConfig], tmp_path: Path) -> None:
    run = change(whole("untied in mid-training, AdamW"), run_dir=str(tmp_path / "run"))
    stop(run, 25, KILL)
    for path in (tmp_path / "run/checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    before = files(tmp_path / "run")
    with pytest.raises(UserError, match=str(tmp_path / "run/checkpoints")):
        train(run)
    assert files(tmp_path / "run") == before


def test_the_checkpoint_of_another_run_is_refused(text_file: Path, tmp_path: Path) -> None:
    run, other = (small_run(text_file, tmp_path / str(seed), seed=seed) for seed in (0, 5))
    for interrupted in (run, other):
        stop(interrupted, 25, KILL)
    foreign = shutil.copy(tmp_path / "5/checkpoints/step-00000020.ckpt", tmp_path / "0/checkpoints/step-00000021.ckpt")
    before = files(tmp_path / "0")
    with pytest.raises(UserError, match=f"^{foreign}: "):
        train(run)
    assert files(tmp_path / "0") == before


# --- what is refused


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("optim.warmup_steps", {"optim": OptimConfig(warmup_steps=6)}),
        ("seed", {"seed": 5}),
        ("seed", {"seed": 5, "checkpoint": CheckpointConfig(resume=False)}),
        ("threads", {"threads": 2}),
        ("trainer.precision", {"precision": "bf16-mixed"}),
        ("loss", {"loss": "chunked"}),
        ("trainer.max_steps", {"max_steps": 7}),
        ("data_hash", {}),  # of another text in the same place
    ],
)
def test_a_setting_that_makes_another_run_is_refused_by_name(
    key: str, changes: dict[str, Any], text_file: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    shutil.copy(text_file, text)
    run = small_run(text, tmp_path / "run")
    stop(run, 12, KILL)
    if key == "data_hash":
        text.write_text(text.read_text() + "one line more\n")
    before = files(tmp_path / "run")
    with pytest.raises(UserError) as caught:
        train(change(run, **changes))
    assert f"{key} is " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files(tmp_path / "run") == before


def test_another_device_is_refused_by_name(text_file: Path, tmp_path: Path) -> None:
    """Its name in config.yaml stands for another machine."""
    run = small_run(text_file, tmp_path / "run")
    stop(run, 12, KILL)
    config = tmp_path / "run/config.yaml"
    config.write_text(config.read_text().replace("accelerator: cpu", "accelerator: cuda"))
    with pytest.raises(UserError, match=r"trainer\.accelerator is cuda there, cpu now"):
        train(run)


def test_a_second_process_is_refused_until_the_first_one_is_dead(text_file: Path, tmp_path: Path) -> None:
    run = small_run(text_file, tmp_path / "run", max_steps=100_000)
    process = spawn(run)
    wait_for(lambda: checkpoints(run))
    assert finish(run) == 2
    assert (tmp_path / "run.refused").read_text().startswith(f"run_dir={run.run_dir}: ")
    process.kill()
    process.join()
    stop(run, checkpoints(run)[-1] + 1, KILL)
