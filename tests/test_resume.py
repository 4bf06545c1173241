"""Nothing is lost: killed for real, a run ends with the same numbers, bit for bit, as one that was left alone."""

import json
import multiprocessing
import os
import random
import resource
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
PROCESSES.set_forkserver_preload(["lm.training.train"])  # the seconds of imports are paid once, not in each process
CLOCK = ("seconds", "tokens_per_second", "resumed_from")


def a_run(corpus: Path, run_dir: Path, steps: int = 120, **changes: Any) -> RunConfig:
    """A run with dropout and accumulation on, so that all that a resume must restore is in play."""
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
        assert time.monotonic() < deadline, "it did not happen in time"
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
def quiet_run(corpus: Path) -> RunConfig:
    """The same run, never disturbed."""
    run = a_run(corpus, corpus.parent / "quiet")
    assert finish(run) == 0
    return run


def kill_at_random(run: RunConfig, kills: int, seed: int) -> None:
    """kill -9 at random moments, each a little later than a checkpoint that was not there before."""
    moments = random.Random(seed)
    for _ in range(kills):
        process, before = spawn(run), checkpoints(run)
        wait_for(lambda before=before, process=process: checkpoints(run) != before or process.exitcode is not None)
        time.sleep(moments.uniform(0, 0.15))
        process.kill()
        process.join()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_run_killed_at_random_moments_ends_as_one_left_alone(
    quiet_run: RunConfig, corpus: Path, tmp_path: Path, seed: int
) -> None:
    run = a_run(corpus, tmp_path / "killed")
    kill_at_random(run, kills=3, seed=seed)
    assert finish(run) == 0
    assert outcome(run) == outcome(quiet_run)
    assert json.loads((tmp_path / "killed/result.json").read_text())["resumed_from"]
    assert not list((tmp_path / "killed").rglob(".partial*"))


def test_in_bf16_with_muon_too(corpus: Path, tmp_path: Path) -> None:
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


def break_nothing(checkpoint: dict[str, Any]) -> None:
    pass


def resume_broken(run: RunConfig, breakage: Callable[[dict[str, Any]], None]) -> None:
    from lm.training.checkpoint import Checkpoints

    load = Checkpoints.load_checkpoint

    def broken(*args: Any, **options: Any) -> dict[str, Any]:
        checkpoint = load(*args, **options)
        breakage(checkpoint)
        return checkpoint

    Checkpoints.load_checkpoint = broken  # type: ignore[method-assign]
    work(run)


@pytest.mark.parametrize("breakage", [break_optimizer, break_position, break_schedule, break_weights, break_dropout])
def test_the_comparison_sees_each_mechanism_switched_off(
    quiet_run: RunConfig, corpus: Path, tmp_path: Path, breakage: Callable[[dict[str, Any]], None]
) -> None:
    for name, harm, same in (("whole", break_nothing, True), ("broken", breakage, False)):
        run = a_run(corpus, tmp_path / name)
        kill_at_random(run, kills=1, seed=0)
        process = PROCESSES.Process(target=resume_broken, args=(run, harm))
        process.start()
        process.join(120)
        assert (outcome(run) == outcome(quiet_run)) == same


def a_split_run(corpus: Path, run_dir: Path) -> RunConfig:
    """Forty steps; the head splits after twenty, and there lies a checkpoint."""
    head = HeadConfig(
        name="untied_midtraining", kind="untied_midtraining", embedding_std=0.02, head_lr_multiplier=0.5, untie_at=0.5
    )
    run = a_run(corpus, run_dir, steps=40, head=head)
    run.trainer["log_every_n_steps"] = 1
    return run


@pytest.fixture(scope="module")
def quiet_split(corpus: Path) -> RunConfig:
    """The same run, never disturbed."""
    run = a_split_run(corpus, corpus.parent / "quiet_split")
    assert finish(run) == 0
    return run


def work_until(run: RunConfig, step: int, signum: int) -> None:
    """Raise a signal in step `step`, or, as kill -9 waits for nothing, right after it."""
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


@pytest.mark.parametrize(
    ("signum", "stops", "resumed_from"),
    [(signal.SIGKILL, [19, 20, 35], [10, 20, 30]), (signal.SIGTERM, [19, 20, 21], [19, 20, 21])],
)
def test_a_split_run_stopped_before_at_and_after_its_split_ends_as_one_left_alone(
    quiet_split: RunConfig,
    corpus: Path,
    tmp_path: Path,
    signum: signal.Signals,
    stops: list[int],
    resumed_from: list[int],
) -> None:
    run = a_split_run(corpus, tmp_path / "stopped")
    for step in stops:
        stop(run, step, signum)
    assert finish(run) == 0
    assert outcome(run) == outcome(quiet_split)
    assert json.loads((tmp_path / "stopped/result.json").read_text())["resumed_from"] == resumed_from


def split_without_moments(checkpoint: dict[str, Any]) -> None:
    from lm.model.head import UntiedMidTrainingHead

    advance = UntiedMidTrainingHead.advance

    def forgetful(head: Any, done: float, table: Any, state: Any) -> None:
        advance(head, done, table, {key: value for key, value in state.items() if key is not table})

    UntiedMidTrainingHead.advance = forgetful  # type: ignore[method-assign]


def split_again(checkpoint: dict[str, Any]) -> None:
    moments = checkpoint["optimizer_states"][0]["state"]
    del moments[max(moments)]  # the head is the last of the groups


@pytest.mark.parametrize(
    ("step", "breakage", "same"),
    [
        (20, break_nothing, True),
        (20, split_without_moments, False),
        (30, break_nothing, True),
        (30, split_again, False),
    ],
)
def test_the_comparison_sees_a_split_that_is_forgotten(
    quiet_split: RunConfig,
    corpus: Path,
    tmp_path: Path,
    step: int,
    breakage: Callable[[dict[str, Any]], None],
    same: bool,
) -> None:
    run = a_split_run(corpus, tmp_path / "run")
    stop(run, step, signal.SIGKILL)
    process = PROCESSES.Process(target=resume_broken, args=(run, breakage))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert (outcome(run) == outcome(quiet_split)) == same


def test_resume_switched_off_starts_again(corpus: Path, tmp_path: Path) -> None:
    run = a_run(corpus, tmp_path / "run")
    kill_at_random(run, kills=1, seed=0)
    assert finish(replace(run, checkpoint=CheckpointConfig(every=10, resume=False))) == 0
    assert json.loads((tmp_path / "run/result.json").read_text())["resumed_from"] == []


def test_switched_off_it_spares_another_run(corpus: Path, tmp_path: Path) -> None:
    from lm.training.train import train

    run = a_run(corpus, tmp_path / "run")
    kill_at_random(run, kills=1, seed=0)
    there = sorted((tmp_path / "run/checkpoints").iterdir())
    assert there
    with pytest.raises(BadInput, match="holds another run"):
        train(replace(run, seed=5, checkpoint=CheckpointConfig(every=10, resume=False)))
    assert sorted((tmp_path / "run/checkpoints").iterdir()) == there


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves_with_its_code(
    quiet_run: RunConfig, corpus: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    run = a_run(corpus, tmp_path / "stopped", checkpoint=CheckpointConfig(every=10_000))
    process = spawn(run)
    wait_for(lambda: "7," in (tmp_path / "stopped/metrics.csv").read_text() if run_began(run) else False)
    os.kill(process.pid, signum)
    process.join(60)
    assert process.exitcode == 128 + signum
    assert len(checkpoints(run)) == 1, "saved at the step where it stopped, not on the interval"
    assert (tmp_path / "stopped/model/model.safetensors").exists(), "an interrupted run can be tried"
    assert not (tmp_path / "stopped/result.json").exists()
    assert finish(run) == 0
    assert outcome(run) == outcome(quiet_run)


def run_began(run: RunConfig) -> bool:
    return Path(str(run.run_dir), "metrics.csv").exists()


def test_a_full_disk_loses_nothing(quiet_run: RunConfig, corpus: Path, tmp_path: Path) -> None:
    run = a_run(corpus, tmp_path / "full")
    kill_at_random(run, kills=1, seed=0)
    before = checkpoints(run)
    assert finish(run, file_size=50_000) == 74, "no checkpoint fits"
    assert checkpoints(run) == before
    assert not list((tmp_path / "full").rglob(".partial*"))
    assert finish(run) == 0
    assert outcome(run) == outcome(quiet_run)


def test_a_damaged_checkpoint_is_passed_over_and_all_damaged_is_an_error(
    quiet_run: RunConfig, corpus: Path, tmp_path: Path
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
    assert outcome(run) == outcome(quiet_run)
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


def test_a_second_process_is_told_who_holds_the_run(corpus: Path, tmp_path: Path) -> None:
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
