"""What a training step of each arm costs on this machine: without a Trainer for a quick estimate, or as it makes it."""

import hashlib
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

from lm.ablation.arms import Arm
from lm.config import RunConfig
from lm.config.identity import hashed_settings
from lm.data.batches import Batch
from lm.data.tokens import prepare
from lm.inference.evaluate import evaluate
from lm.system.device import cpu_name, fast_attention, is_mixed
from lm.training.loss import build_loss
from lm.training.optim import build_optimizer
from lm.training.resolve import build_model, n_batches, n_validations, resolve

MIN_ROUNDS, MAX_ROUNDS, MIN_SECONDS = 5, 40, 20.0  # of a measurement
WARM_UP_STEPS, TIMED_STEPS = 2, 6  # optimizer steps of a measurement with the Trainer
TIMED_BATCHES = 4  # of a validation
NEVER = 10**9  # steps
COST_FREE = (
    "seed",
    "optim.lr",
    "head.embedding_lr_multiplier",
    "head.head_lr_multiplier",
    "head.name",
    "trainer.max_steps",
)
log = logging.getLogger(__name__)


def measure(
    arms: Mapping[str, Arm], earlier: dict[str, float], with_trainer: bool, plan_only: bool = False
) -> dict[str, float]:
    """Give each arm its seconds per step; returns all that were ever measured, by computation, code and machine.

    With a time budget, steps are measured in the Lightning Trainer (`with_trainer`), because the number of steps
    depends on them; otherwise, and for a plan alone, a bare training step is measured for the estimate. Known
    measurements are used again, so that the number of steps does not change between calls. New arms are measured
    together with the others, since only times taken in turns compare, and put in proportion to their earlier times.
    """
    keys = {name: _computation(arm, with_trainer) for name, arm in arms.items()}
    if plan_only and with_trainer and not earlier.keys() >= {*keys.values()}:
        return measure(arms, earlier, with_trainer=False)
    distinct = {keys[name]: arm for name, arm in arms.items()}  # arms that compute the same take the same time
    if distinct.keys() - earlier.keys():
        log.info("measuring a training step of each arm")
        timers = [_trainer_step(arm) if with_trainer else _bare_step(arm) for arm in distinct.values()]
        measured = dict(zip(distinct, time_in_turns(timers), strict=True))
        scale = median([earlier[key] / seconds for key, seconds in measured.items() if key in earlier] or [1])
        earlier = {key: seconds * scale for key, seconds in measured.items()} | earlier
    for name, arm in arms.items():
        arm.seconds_per_step = earlier[keys[name]]
    return earlier


def time_in_turns(steps: list[Callable[[], float]]) -> list[float]:
    """Seconds of a training step of each arm, from rounds in which the arms take turns.

    Taking turns, they share whatever else the machine is doing: each is the median, over the rounds, of its ratio to
    the first arm, times the median of the first.
    """
    for step in steps:
        step()  # warms up
    started = time.perf_counter()
    rounds: list[list[float]] = []  # seconds of every arm
    with tqdm(total=1.0, desc="measuring steps", leave=False, disable=None, bar_format="{desc} |{bar}|") as bar:
        while (fraction := _progress(len(rounds), time.perf_counter() - started)) < 1:
            bar.update(fraction - bar.n)
            rounds.append([step() for step in steps])
    first = median(times[0] for times in rounds)
    return [first * median(times[i] / times[0] for times in rounds) for i in range(len(steps))]


def _progress(rounds: int, seconds: float) -> float:
    """
    >>> _progress(4, 99.0), _progress(5, 10.0), _progress(5, 20.0), _progress(40, 3.0)
    (0.8, 0.5, 1.0, 1.0)
    """
    return min(1.0, rounds / MIN_ROUNDS, max(rounds / MAX_ROUNDS, seconds / MIN_SECONDS))


@cache
def machine() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, {platform.machine()}, {cpu_name()}, {os.cpu_count()} cores, {gpu}"


def _computation(arm: Arm, with_trainer: bool) -> str:
    """What the cost of a step depends on: all settings but those without a cost, the code and the machine."""
    settings = {key: value for key, value in hashed_settings(asdict(arm.run)).items() if key not in COST_FREE}
    content = repr((sorted(settings.items()), arm.identity, arm.steps["own"], with_trainer))
    return f"{hashlib.sha256(content.encode()).hexdigest()[:16]} {machine()}"


def _trainer_step(arm: Arm) -> Callable[[], float]:
    return TimedTraining(arm.run, arm.steps["own"])


def _bare_step(arm: Arm) -> Callable[[], float]:
    """A step without a Trainer, with its share of validations, in which a forward pass is a third of a step."""
    step, steps, n_all = TimedStep(arm.run, arm.vocab_size), arm.steps["own"], n_batches(arm.run, arm.val_tokens)
    passes = n_validations(arm.run, steps) * min(arm.run.validation.batches or n_all, n_all)
    return lambda: step() * (1 + passes / steps / 3)


def train_step(
    loss: Callable[[Tensor, Tensor], Tensor], optimizer: Optimizer, micro_batches: Iterable[Batch], mixed: bool = False
) -> None:
    """Forward, backward, clip at 1, update. `loss` maps token ids (B, T) and targets (B, T) to a scalar."""
    for tokens, targets in micro_batches:
        device = tokens.device.type
        with torch.autocast(device, torch.bfloat16, enabled=mixed), fast_attention(device, mixed, tokens.shape[1]):
            value = loss(tokens, targets)
        value.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_([parameter for group in optimizer.param_groups for parameter in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def step_time(step: Callable[[], object], seconds: float) -> float:
    """The mean seconds of the steps that so many seconds hold, of one at least."""
    started, n_steps = time.perf_counter(), 0
    while not n_steps or time.perf_counter() - started < seconds:
        step()
        n_steps += 1
    return (time.perf_counter() - started) / n_steps


class TimedStep:
    """A training step on random tokens; called, it returns its seconds."""

    def __init__(self, run: RunConfig, vocab_size: int) -> None:
        run = resolve(run, vocab_size)
        self.device, n_micro = run.trainer.accelerator, run.trainer.accumulate_grad_batches
        self.net = build_model(run, vocab_size).to(self.device)
        self.mixed = is_mixed(run.trainer.precision)
        self.loss = partial(build_loss(run), self.net)
        self.net.head.on_train_step(0.0, self.net.embed.weight, {})
        self.optimizer = build_optimizer(self.net, run.optim, run.head)
        tokens = torch.randint(vocab_size, (run.data.batch_size // n_micro, run.data.seq_len), device=self.device)
        self.batches = [(tokens, tokens)] * n_micro

    def __call__(self) -> float:
        started = time.perf_counter()
        train_step(self.loss, self.optimizer, self.batches, self.mixed)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


class TimedTraining:
    """A few steps of the Trainer with real batches, logged as in a run; called, it returns the seconds of one step.

    Its share of the validations of a run of `steps` steps is included; checkpoints and the final score are not.
    """

    def __init__(self, run: RunConfig, steps: int) -> None:
        self.data = prepare(run.data, run.tokenizer)
        run = resolve(run, self.data.tokenizer.vocab_size)
        self.validation, self.validations = run.validation, n_validations(run, steps) / steps  # for each step
        self.run = replace(
            run,
            max_tokens=None,
            trainer=replace(run.trainer, max_steps=WARM_UP_STEPS + TIMED_STEPS, enable_progress_bar=False),
            checkpoint=replace(run.checkpoint, every=NEVER),
            validation=replace(run.validation, every=0),
            diagnostics=replace(run.diagnostics, every=0),
            prompts=None,
        )
        self.net = build_model(self.run, self.data.tokenizer.vocab_size, self.data.tokenizer.eot)

    def __call__(self) -> float:
        return median(self._step_seconds()) + self.validations * self._validation_seconds()

    def _step_seconds(self) -> list[float]:
        """Seconds of each step after the first ones, which set up what later ones use again."""
        # Lightning takes seconds to import, and most plans need only TimedStep
        from lightning import Callback, Trainer

        from lm.training.callbacks import LogAndValidate
        from lm.training.metrics import MetricsFile
        from lm.training.module import LMModule
        from lm.training.run_directory import RunDirectory
        from lm.training.train import build_trainer

        ends: list[float] = []

        class Clock(Callback):
            def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
                if trainer.global_step > len(ends):
                    if torch.cuda.is_available():
                        torch.cuda.synchronize()
                    ends.append(time.perf_counter())

        with tempfile.TemporaryDirectory() as name:
            directory = RunDirectory(Path(name))
            trainer = build_trainer(self.run, directory, [LogAndValidate(MetricsFile(directory.metrics)), Clock()])
            with fast_attention(
                self.run.trainer.accelerator, is_mixed(self.run.trainer.precision), self.run.data.seq_len
            ):
                trainer.fit(LMModule(self.net, self.run, self.data))
        return [end - start for start, end in pairwise(ends[WARM_UP_STEPS - 1 :])]

    def _validation_seconds(self) -> float:
        if not self.validations:
            return 0.0
        data, tokens, whole = self.run.data, self.data.val, n_batches(self.run, len(self.data.val))
        n = min(self.validation.batches or whole, whole)
        timed = min(TIMED_BATCHES, n)
        self.net.to(self.run.trainer.accelerator)  # Lightning has moved it to the CPU
        started = time.perf_counter()
        evaluate(self.net, tokens, data.seq_len, data.batch_size, timed)
        return (time.perf_counter() - started) * n / timed
