"""Small runs: in this process, in processes that are stopped, and as commands."""

import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from lm.cli.arguments import for_hydra, kinds_of
from lm.cli.compose import compose
from lm.cli.evaluate import score_text
from lm.config import (
    CheckpointConfig,
    DataConfig,
    HeadConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TokenizerConfig,
    TrainerConfig,
    ValidationConfig,
)
from lm.data.tokens import prepare
from lm.folder import load_model
from lm.system.device import set_threads
from lm.system.files import read_csv, read_json
from lm.system.signals import Interrupted, Signals
from lm.training.train import train

CLOCK = ("seconds", "tokens_per_second", "resumed_from")  # of a result: what an interruption changes
MUON = OptimConfig(name="muon", lr=0.02, adam_lr=0.003, momentum=0.9, ns_steps=4, warmup_steps=5)

MODEL = ["model.n_layers=1", "model.d_model=32", "model.n_heads=2", "model.d_ff=48", "model.rope_theta=50"]
RUN = [
    *("experiment=none", "data=text", "data.seq_len=32", "data.batch_size=4", "trainer=cpu", "trainer.max_steps=12"),
    *("trainer.enable_progress_bar=false", "trainer.log_every_n_steps=1", "checkpoint.every=4", "prompts=[]"),
    *("validation.every=0", "validation.batches=null", "threads=1"),
]

compiles = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, inside its compiler


def change(run, **changes):
    """The run with other settings, those of its trainer included: change(run, seed=1, max_steps=3)."""
    trainer = {name: changes.pop(name) for name in TrainerConfig.__slots__ if name in changes}
    return replace(run, trainer=replace(run.trainer, **trainer), **changes)


def small_run(text, run_dir, **changes):
    """A run of 120 steps with dropout and accumulation, so that it uses everything that a resume must restore."""
    run = RunConfig(
        model=ModelConfig(n_layers=2, d_model=32, n_heads=2, d_ff=64, dropout=0.1),
        head=HeadConfig(name="untied", kind="untied", head_std=0.01, head_lr_multiplier=0.5),
        data=DataConfig(source="text", path=str(text), seq_len=32, batch_size=4, cache_dir=str(text.parent / "cache")),
        tokenizer=TokenizerConfig(kind="byte", vocab_size=None),
        optim=OptimConfig(warmup_steps=5),
        trainer=TrainerConfig(
            accelerator="cpu",
            precision="32-true",
            max_steps=120,
            accumulate_grad_batches=2,
            gradient_clip_val=None,
            log_every_n_steps=7,
            enable_progress_bar=False,
        ),
        checkpoint=CheckpointConfig(every=10),
        validation=ValidationConfig(every=20, batches=2),
        prompts=[],
        run_dir=str(run_dir),
        threads=1,
    )
    return change(run, **changes)


def short_run(text, run_dir, **changes):
    """Twenty logged steps without dropout."""
    settings = {"max_steps": 20, "accumulate_grad_batches": 1, "log_every_n_steps": 1}
    model = ModelConfig(n_layers=2, d_model=32, n_heads=2, d_ff=64)
    return small_run(text, run_dir, **{"model": model, **settings, **changes})


def overfitting_run(text, run_dir, **changes):
    """Twenty-four logged steps whose val/loss is lowest in the middle: the validation text is in reversed order."""
    backwards = text.parent / "backwards.txt"
    backwards.write_text(text.read_text()[:2000][::-1])
    settings = {"max_steps": 24, "log_every_n_steps": 1}
    settings |= {"validation": ValidationConfig(every=2, batches=2), "checkpoint": CheckpointConfig(every=5, keep=3)}
    settings |= {"optim": OptimConfig(lr=0.02, warmup_steps=2, decay="constant")}
    run = small_run(text, run_dir, **{**settings, **changes})
    return replace(run, data=replace(run.data, val_path=str(backwards)))


PLACES = ("data.path=", "data.cache_dir=", "run_dir=")  # in which alone many runs of tests differ


def composed(*overrides):
    """Return the configuration of train with these words, whose paths have no quotes of their own.

    With run_dir=RUN alone, return the configuration of the run there.
    """
    places = {word.partition("=")[0]: word.partition("=")[2] for word in overrides if word.startswith(PLACES)}
    continues = "run_dir" in places and Path(places["run_dir"]).exists()
    continues |= any(word.startswith("init_from=") for word in overrides)
    if continues or "data.path" not in places or "$" in "".join(places.values()):
        return _composed(*overrides)
    run = _composed_once(*(word for word in overrides if not word.startswith(PLACES)), "data.path=text")
    own = {key: value for key, value in places.items() if key == "run_dir"}
    data = {key.removeprefix("data."): value for key, value in places.items() if key != "run_dir"}
    return replace(deepcopy(run), data=replace(run.data, **data), **own)


def _composed(*overrides):
    kinds = kinds_of(RunConfig)
    return compose("train", [for_hydra(word, kinds) for word in overrides], RunConfig)


_composed_once = cache(_composed)  # composing takes a quarter of a second


# --- the files of a run


def at_home(home, *overrides):
    """A run of seconds on the text in a folder."""
    return composed(*RUN, f"data.path={home / 'text'}", *overrides)


def data_of(run):
    """The tokens that a run is trained and scored on."""
    return prepare(run.data, run.tokenizer)


def result(run_dir):
    return read_json(run_dir / "result.json")


def rows(run_dir, name="metrics"):
    return read_csv(run_dir / f"{name}.csv")


def column(run_dir, name, file="metrics"):
    return [float(row[name]) for row in rows(run_dir, file) if row[name]]


def losses(run_dir):
    return column(run_dir, "train/loss")


def checkpoints(run):
    """The steps of its checkpoints."""
    return sorted(int(path.stem.removeprefix("step-")) for path in Path(str(run.run_dir), "checkpoints").glob("step-*"))


def files(folder):
    """The content of each file, but for hidden ones."""
    return {path: path.read_bytes() for path in folder.rglob("[!.]*") if path.is_file()}


def outcome(run):
    """All that a run leaves, but for what depends on the time or on interruptions."""
    folder = Path(str(run.run_dir))
    logs = {path.name: path.read_text() for path in sorted([*folder.glob("*.csv"), *folder.glob("samples.jsonl")])}
    scores = {key: value for key, value in result(folder).items() if key not in CLOCK}
    return {"result": scores, "weights": (folder / "model/model.safetensors").read_bytes(), **logs}


def evaluate_run(config):
    """Score the run of `config` on its own validation text, or on the text of `config`."""
    set_threads(config.threads)
    net, tokenizer = load_model(str(config.run_dir), config.classes or ())
    return score_text(net, tokenizer, Path(str(config.run_dir)), config.data, config, {})


# --- runs that do not end by themselves


def signal_at(step, signum):
    """Let this process get a signal after the rows of this step are written, before its checkpoint is."""
    arrived = Signals.arrived

    def with_a_signal(self, fabric, current):
        if current == step:
            os.kill(os.getpid(), signum)
        return arrived(self, fabric, current)

    Signals.arrived = with_a_signal  # type: ignore[method-assign]


@contextmanager
def signalled(step, signum=signal.SIGTERM):
    """A run in this process gets a signal after a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Signals, "arrived", Signals.arrived)  # which is put back
        signal_at(step, signum)
        yield


def stop(run, step):
    """Train a run in this process until SIGTERM stops it after a step."""
    with signalled(step), pytest.raises(Interrupted, match=rf"after step {step}\b"):
        train(run)


PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["lm.training.train", "tests.helpers.runs"])  # which takes seconds, once


def spawn(run, *before):
    """Start to train a run in a process of its own, which first calls the functions `before`, each of a module."""
    process = PROCESSES.Process(target=_work, args=(run, before))
    process.start()
    return process


def kill(run, step, *before):
    """Train a run in a process of its own until SIGKILL ends it after a step."""
    process = spawn(run, partial(signal_at, step, signal.SIGKILL), *before)
    process.join(120)
    code = process.exitcode
    process.kill()  # if it still trains after two minutes
    assert code == -signal.SIGKILL


def _work(run, before):
    # An ablation that ran before in this process may have started the server, which blocks them in all it forks.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    for function in before:
        function()
    train(run)


def set_environment(**values):
    os.environ.update(values)


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.002)
