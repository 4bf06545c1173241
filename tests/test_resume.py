"""A run that is killed and resumed ends with the same numbers, bit for bit, as an undisturbed one."""

import errno
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TEXT

from lm.config import (
    BadInput,
    CheckpointConfig,
    DataConfig,
    HeadConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TokenizerConfig,
    ValidationConfig,
)

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["lm.training.train"])  # imports, which take seconds, run once for all processes
CLOCK = ("seconds", "tokens_per_second", "resumed_from", "checksum")  # the last is one of all the others


def a_run(corpus: Path, run_dir: Path, steps: int = 120, **changes: Any) -> RunConfig:
    """A run with dropout and accumulation, so that it uses everything that a resume must restore."""
    trainer = {"accelerator": "cpu", "devices": 1, "max_steps": steps, "accumulate_grad_batches": 2}
    run = RunConfig(
        model=ModelConfig(n_layers=2, d_model=32, n_heads=2, d_ff=64, dropout=0.1),
        head=HeadConfig(name="untied", kind="untied", head_std=0.01, head_lr_multiplier=0.5),
        data=DataConfig(
            source="text", path=str(corpus), seq_len=32, batch_size=4, cache_dir=str(corpus.parent / "cache")
        ),
        tokenizer=TokenizerConfig(kind="byte", vocab_size=None),
        optim=OptimConfig(warmup_steps=5),
        trainer=trainer | {"precision": "32-true", "log_every_n_steps": 7, "enable_progress_bar": False},
        checkpoint=CheckpointConfig(every=10),
        validation=ValidationConfig(every=20, batches=2),
        run_dir=str(run_dir),
        threads=1,
    )
    return replace(run, **changes)


def work(run: RunConfig, file_size: int | None = None) -> None:
    from lm.training.callbacks import Interrupted
    from lm.training.train import train

    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    try:
        train(run)
    except BadInput as error:
        print(error)
        os._exit(2)
    except OSError:
        os._exit(74)
    except Interrupted as error:
        os._exit(128 + error.signum)


def spawn(run: RunConfig, **options: Any) -> Any:
    process = PROCESSES.Process(target=work, args=(run,), kwargs=options)
    process.start()
    return process


def finish(run: RunConfig, **options: Any) -> int:
    process = spawn(run, **options)
    process.join(120)
    return process.exitcode


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.002)


def checkpoints(run: RunConfig) -> list[str]:
    return sorted(path.name for path in Path(str(run.run_dir), "checkpoints").glob("step-*"))


def outcome(run: RunConfig) -> dict[str, Any]:
    place = Path(str(run.run_dir))
    result = json.loads((place / "result.json").read_text())
    return {
        "result": {key: value for key, value in result.items() if key not in CLOCK},
        "metrics": (place / "metrics.csv").read_text(),
        "weights": (place / "model" / "model.safetensors").read_bytes(),
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def undisturbed(corpus: Path) -> RunConfig:
    """The run without interruption."""
    run = a_run(corpus, corpus.parent / "undisturbed")
    assert finish(run) == 0
    return run


def kill_at_random(run: RunConfig, kills: int, seed: int) -> None:
    """kill -9 at random times, each shortly after a new checkpoint."""
    moments = random.Random(seed)
    for _ in range(kills):
        process, before = spawn(run), checkpoints(run)
        wait_for(lambda before=before, process=process: checkpoints(run) != before or process.exitcode is not None)
        time.sleep(moments.uniform(0, 0.15))
        process.kill()
        process.join()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_run_killed_at_random_ends_as_an_undisturbed_one(
    undisturbed: RunConfig, corpus: Path, tmp_path: Path, seed: int
) -> None:
    run = a_run(corpus, tmp_path / "killed")
    kill_at_random(run, kills=3, seed=seed)
    assert finish(run) == 0
    assert outcome(run) == outcome(undisturbed)
    assert json.loads((tmp_path / "killed/result.json").read_text())["resumed_from"]
    assert not list((tmp_path / "killed").rglob(".partial*"))


@pytest.mark.slow
def test_a_killed_bf16_muon_run_ends_as_an_undisturbed_one(corpus: Path, tmp_path: Path) -> None:
    alone, killed = (a_run(corpus, tmp_path / name) for name in ("alone", "killed"))
    options = alone.trainer | {"precision": "bf16-mixed"}
    optim = OptimConfig(name="muon", lr=0.02, adam_lr=0.003, momentum=0.9, ns_steps=4)
    alone, killed = (replace(run, trainer=options, optim=optim) for run in (alone, killed))
    assert finish(alone) == 0
    kill_at_random(killed, kills=2, seed=0)
    assert finish(killed) == 0
    assert outcome(killed) == outcome(alone)


def break_optimizer(checkpoint: dict[str, Any]) -> None:
    for state in checkpoint["optimizer_states"][0]["state"].values():
        state["exp_avg"].zero_()


def break_position(checkpoint: dict[str, Any]) -> None:
    from lm.training.task import TrainingStream

    init = TrainingStream.__init__

    def from_the_start(self: Any, tokens: Any, **options: Any) -> None:
        init(self, tokens, **{**options, "start": 0})

    TrainingStream.__init__ = from_the_start  # type: ignore[method-assign]


def break_schedule(checkpoint: dict[str, Any]) -> None:
    checkpoint["lr_schedulers"][0]["last_epoch"] = 0


def break_weights(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["net.norm.weight"] += 1e-6


def break_dropout(checkpoint: dict[str, Any]) -> None:
    import lm.training.task

    lm.training.task.named_seed = lambda *_: 1


def change_nothing(checkpoint: dict[str, Any]) -> None:
    pass


def resume_broken(run: RunConfig, change: Callable[[dict[str, Any]], None]) -> None:
    from lm.training.checkpoint import Checkpoints

    load = Checkpoints.load_checkpoint

    def broken(*args: Any, **options: Any) -> dict[str, Any]:
        checkpoint = load(*args, **options)
        change(checkpoint)
        return checkpoint

    Checkpoints.load_checkpoint = broken  # type: ignore[method-assign]
    work(run)


@pytest.mark.slow
@pytest.mark.parametrize("change", [break_optimizer, break_position, break_schedule, break_weights, break_dropout])
def test_the_comparison_sees_each_mechanism_switched_off(
    undisturbed: RunConfig, corpus: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    for name, how, same in (("whole", change_nothing, True), ("broken", change, False)):
        run = a_run(corpus, tmp_path / name)
        kill_at_random(run, kills=1, seed=0)
        process = PROCESSES.Process(target=resume_broken, args=(run, how))
        process.start()
        process.join(120)
        assert (outcome(run) == outcome(undisturbed)) == same


def a_midtraining_run(corpus: Path, run_dir: Path) -> RunConfig:
    """Forty steps; the head is untied after twenty, where a checkpoint is saved."""
    head = HeadConfig(
        name="untied_midtraining", kind="untied_midtraining", embedding_std=0.02, head_lr_multiplier=0.5, untie_at=0.5
    )
    run = a_run(corpus, run_dir, steps=40, head=head)
    run.trainer["log_every_n_steps"] = 1
    return run


@pytest.fixture(scope="module")
def undisturbed_midtraining(corpus: Path) -> RunConfig:
    """The run without interruption."""
    run = a_midtraining_run(corpus, corpus.parent / "undisturbed_midtraining")
    assert finish(run) == 0
    return run


def work_until(run: RunConfig, step: int, signum: int) -> None:
    """Raise a signal in step `step`; SIGKILL, which takes effect at once, right after it."""
    from lm.training.callbacks import TrainingCallback

    end = TrainingCallback.on_train_batch_end

    def on_train_batch_end(self: TrainingCallback, trainer: Any, *args: Any) -> None:
        here = trainer.global_step == step and (args[-1] + 1) % trainer.accumulate_grad_batches == 0
        if here and signum != signal.SIGKILL:
            os.kill(os.getpid(), signum)
        end(self, trainer, *args)
        if here:
            os.kill(os.getpid(), signum)

    TrainingCallback.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]
    work(run)


def stop(run: RunConfig, step: int, signum: signal.Signals) -> None:
    process = PROCESSES.Process(target=work_until, args=(run, step, signum))
    process.start()
    process.join(120)
    assert process.exitcode == (-signum if signum == signal.SIGKILL else 128 + signum)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "stops", "resumed_from"),
    [(signal.SIGKILL, [19, 20, 35], [10, 20, 30]), (signal.SIGTERM, [19, 20, 21], [19, 20, 21])],
)
def test_a_run_stopped_before_at_and_after_untying_ends_as_an_undisturbed_one(
    undisturbed_midtraining: RunConfig,
    corpus: Path,
    tmp_path: Path,
    signum: signal.Signals,
    stops: list[int],
    resumed_from: list[int],
) -> None:
    run = a_midtraining_run(corpus, tmp_path / "stopped")
    for step in stops:
        stop(run, step, signum)
    assert finish(run) == 0
    assert outcome(run) == outcome(undisturbed_midtraining)
    assert json.loads((tmp_path / "stopped/result.json").read_text())["resumed_from"] == resumed_from


def untie_without_moments(checkpoint: dict[str, Any]) -> None:
    from lm.model.head import UntiedMidTrainingHead

    on_train_step = UntiedMidTrainingHead.on_train_step

    def forgetful(head: Any, progress: float, embedding: Any, state: Any) -> None:
        on_train_step(head, progress, embedding, {key: value for key, value in state.items() if key is not embedding})

    UntiedMidTrainingHead.on_train_step = forgetful  # type: ignore[method-assign]


def untie_again(checkpoint: dict[str, Any]) -> None:
    moments = checkpoint["optimizer_states"][0]["state"]
    del moments[max(moments)]  # the head's, the last group


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "change", "same"),
    [
        (20, change_nothing, True),
        (20, untie_without_moments, False),
        (30, change_nothing, True),
        (30, untie_again, False),
    ],
)
def test_the_comparison_sees_an_untying_that_is_repeated_or_loses_moments(
    undisturbed_midtraining: RunConfig,
    corpus: Path,
    tmp_path: Path,
    step: int,
    change: Callable[[dict[str, Any]], None],
    same: bool,
) -> None:
    run = a_midtraining_run(corpus, tmp_path / "run")
    stop(run, step, signal.SIGKILL)
    process = PROCESSES.Process(target=resume_broken, args=(run, change))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert (outcome(run) == outcome(undisturbed_midtraining)) == same


@pytest.mark.slow
def test_without_resume_a_run_starts_again(corpus: Path, tmp_path: Path) -> None:
    run = a_run(corpus, tmp_path / "run")
    kill_at_random(run, kills=1, seed=0)
    assert finish(replace(run, checkpoint=CheckpointConfig(every=10, resume=False))) == 0
    assert json.loads((tmp_path / "run/result.json").read_text())["resumed_from"] == []


def test_without_resume_another_run_is_not_deleted(corpus: Path, tmp_path: Path) -> None:
    from lm.training.train import train

    run = a_run(corpus, tmp_path / "run")
    kill_at_random(run, kills=1, seed=0)
    there = sorted((tmp_path / "run/checkpoints").iterdir())
    assert there
    with pytest.raises(BadInput, match="holds another run"):
        train(replace(run, seed=5, checkpoint=CheckpointConfig(every=10, resume=False)))
    assert sorted((tmp_path / "run/checkpoints").iterdir()) == there


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_and_sets_the_exit_code(
    undisturbed: RunConfig, corpus: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    run = a_run(corpus, tmp_path / "stopped", checkpoint=CheckpointConfig(every=10_000))
    process = spawn(run)
    wait_for(lambda: "7," in (tmp_path / "stopped/metrics.csv").read_text() if run_began(run) else False)
    os.kill(process.pid, signum)
    process.join(60)
    assert process.exitcode == 128 + signum
    assert len(checkpoints(run)) == 1, "saved at the step where it stopped"
    assert (tmp_path / "stopped/model/model.safetensors").exists(), "an interrupted run can generate text"
    assert not (tmp_path / "stopped/result.json").exists()
    assert finish(run) == 0
    assert outcome(run) == outcome(undisturbed)


def work_until_scored(run: RunConfig, signum: signal.Signals) -> None:
    """Raise a signal when the final score begins."""
    import lm.training.result

    evaluate = lm.training.result.evaluate

    def signalled(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signum)
        return evaluate(*args, **options)

    lm.training.result.evaluate = signalled
    work(run)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_run_stopped_at_its_final_score_only_scores_again(
    undisturbed: RunConfig, corpus: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    run = a_run(corpus, tmp_path / "stopped")
    process = PROCESSES.Process(target=work_until_scored, args=(run, signum))
    process.start()
    process.join(120)
    assert process.exitcode == (-signum if signum == signal.SIGKILL else 128 + signum), "at once"
    assert checkpoints(run)[-1].startswith("step-00000120")
    assert "\n120," not in (tmp_path / "stopped/metrics.csv").read_text()
    assert finish(run) == 0
    assert outcome(run) == outcome(undisturbed)
    assert json.loads((tmp_path / "stopped/result.json").read_text())["resumed_from"] == [120]


def run_began(run: RunConfig) -> bool:
    return Path(str(run.run_dir), "metrics.csv").exists()


def test_a_full_disk_loses_nothing(undisturbed: RunConfig, corpus: Path, tmp_path: Path) -> None:
    run = a_run(corpus, tmp_path / "full")
    kill_at_random(run, kills=1, seed=0)
    before = checkpoints(run)
    assert finish(run, file_size=50_000) == 74, "no space for a checkpoint"
    assert checkpoints(run) == before
    assert not list((tmp_path / "full").rglob(".partial*"))
    assert finish(run) == 0
    assert outcome(run) == outcome(undisturbed)


def test_a_disk_full_inside_of_torch_is_an_error_of_the_file(corpus: Path, tmp_path: Path) -> None:
    """torch reports the OSError of its file as an error of its own, except in the last bytes of a file."""
    run = a_run(corpus, tmp_path / "full")
    assert [finish(run, file_size=size) for size in (20_000, 50_000)] == [74, 74]
    assert checkpoints(run) == []


def without_permission(run: RunConfig) -> None:
    """As for who may not read the folder of checkpoints, also for root."""

    def refusing(read: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any = ".") -> Any:
            if not isinstance(path, int) and Path(path).name == "checkpoints":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return read(path)

        return refuse

    os.listdir, os.scandir = refusing(os.listdir), refusing(os.scandir)  # type: ignore[assignment]
    work(run)


def test_a_pipe_in_the_place_of_a_checkpoint_is_not_waited_for(tmp_path: Path) -> None:
    from lm.training.checkpoint import Checkpoints

    os.mkfifo(tmp_path / "step-00000001-0000000000000000.ckpt")
    with pytest.raises(OSError, match="is a pipe or a device"):
        Checkpoints(tmp_path, keep=1).newest()


def test_checkpoints_that_cannot_be_listed_are_not_absent(undisturbed: RunConfig, corpus: Path, tmp_path: Path) -> None:
    run = a_run(corpus, tmp_path / "run")
    kill_at_random(run, kills=1, seed=0)
    folder, elsewhere = tmp_path / "run/checkpoints", tmp_path / "run/elsewhere"
    before = (tmp_path / "run/metrics.csv").read_bytes(), checkpoints(run)
    process = PROCESSES.Process(target=without_permission, args=(run,))
    process.start()
    process.join(120)
    assert process.exitcode == 74
    folder.rename(elsewhere)
    for put in (folder.touch, lambda: folder.symlink_to("absent")):
        put()
        assert finish(run) == 74
        folder.unlink()
    elsewhere.rename(folder)
    assert ((tmp_path / "run/metrics.csv").read_bytes(), checkpoints(run)) == before
    assert finish(run) == 0
    assert outcome(run) == outcome(undisturbed)


@pytest.mark.slow
def test_the_checkpoint_of_another_run_is_refused(undisturbed: RunConfig, corpus: Path, tmp_path: Path) -> None:
    from lm.training.train import train

    run, other = a_run(corpus, tmp_path / "run"), a_run(corpus, tmp_path / "other", seed=5)
    for one in (run, other):
        kill_at_random(one, kills=1, seed=0)
    before = (tmp_path / "run/metrics.csv").read_bytes()
    foreign = tmp_path / "run/checkpoints" / checkpoints(other)[-1].replace("step-00", "step-01")
    shutil.copy(tmp_path / "other/checkpoints" / checkpoints(other)[-1], foreign)
    with pytest.raises(BadInput, match=rf"{foreign}: a checkpoint of another run \(seed is 5 there, 0 here\)"):
        train(run)
    assert (tmp_path / "run/metrics.csv").read_bytes() == before
    foreign.unlink()
    assert finish(run) == 0
    assert outcome(run) == outcome(undisturbed)


def test_a_resume_refuses_damaged_metrics_and_leaves_them(corpus: Path, tmp_path: Path) -> None:
    from lm.training.train import train

    run = a_run(corpus, tmp_path / "run", steps=10)
    train(run)
    (tmp_path / "run/result.json").unlink()
    path = tmp_path / "run/metrics.csv"
    whole = path.read_bytes()
    first, rest = whole.split(b"\n", 1)
    for damaged in (
        b"",
        b"step,tokens,le\n" + rest,
        bytes(50),
        first.replace(b"p", b"q") + b"\n" + rest,
        first + b"\n" + rest.replace(b"0.", b"1.", 1),
        b"\xff" + whole,
    ):
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match=r"metrics\.csv: .*; remove it to go on without its rows"):
            train(run)
        assert path.read_bytes() == damaged
    path.write_bytes(whole)
    train(run)
    assert path.read_bytes() == whole
    (tmp_path / "run/result.json").unlink()
    for checkpoint in tmp_path.glob("run/checkpoints/*"):
        checkpoint.unlink()
    checkpoint.with_name(f"step-00000009-{hashlib.sha256(b'pickle').hexdigest()[:16]}.ckpt").write_bytes(b"pickle")
    with pytest.raises(BadInput, match=r"\.ckpt: no checkpoint that train has written; remove it"):
        train(run)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_and_only_damaged_ones_are_an_error(
    undisturbed: RunConfig, corpus: Path, tmp_path: Path
) -> None:
    run = a_run(corpus, tmp_path / "damaged")
    kill_at_random(run, kills=2, seed=1)
    assert len(checkpoints(run)) == 2

    def flip_a_bit(name: str) -> None:
        path = tmp_path / "damaged/checkpoints" / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    older, newer = checkpoints(run)
    flip_a_bit(newer)
    assert finish(run) == 0
    assert outcome(run) == outcome(undisturbed)
    assert int(older[5:13]) in json.loads((tmp_path / "damaged/result.json").read_text())["resumed_from"]

    (tmp_path / "damaged/result.json").unlink()
    for name in checkpoints(run):
        flip_a_bit(name)
    assert finish(run) == 2


def test_a_setting_that_makes_another_run_is_refused_by_name(tmp_path: Path) -> None:
    from lm.training.train import train

    corpus = tmp_path / "corpus.txt"
    corpus.write_text(TEXT)
    run = a_run(corpus, tmp_path / "run")
    kill_at_random(run, kills=1, seed=0)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("[!.]*") if path.is_file()}
    with pytest.raises(BadInput, match=r"optim\.warmup_steps is 5 there, 6 now"):
        train(replace(run, optim=OptimConfig(warmup_steps=6)))
    with pytest.raises(BadInput, match="threads"):
        train(replace(run, threads=2))
    corpus.write_text(TEXT + "one line more\n")
    with pytest.raises(BadInput, match="data_hash"):
        train(run)
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("[!.]*") if path.is_file()}
    assert before == after


def test_a_second_process_is_refused_with_the_holder_named(corpus: Path, tmp_path: Path) -> None:
    from lm.training.train import train

    run = a_run(corpus, tmp_path / "held", steps=100_000)
    process = spawn(run)
    wait_for(lambda: checkpoints(run))
    with pytest.raises(BadInput, match=f"is being written by process {process.pid} on "):
        train(run)
    process.kill()
    process.join()
    other = replace(run, trainer=run.trainer | {"max_steps": 7})
    with pytest.raises(BadInput, match=r"trainer\.max_steps"):  # the dead process holds it no longer
        train(other)
