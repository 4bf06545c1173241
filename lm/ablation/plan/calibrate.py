"""What a training step of each arm costs on this machine."""

import hashlib
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from tqdm import tqdm

from lm.ablation.plan.arms import Arm, Arms
from lm.ablation.plan.timing import TimedStep, TimedTraining
from lm.system.device import cpu_name
from lm.training.resolve import n_batches, n_validations, resolve

LONG_ENOUGH = 20.0  # seconds
FEWEST_ROUNDS, MOST_ROUNDS = 5, 40
log = logging.getLogger(__name__)


def measure(arms: Arms, known: dict[str, float], decides: bool) -> dict[str, float]:
    """Give each arm its seconds per step; returns all that were ever measured, by computation, code and machine.

    If that `decides` how many steps arms make, the steps are those of the real Trainer; else a bare step is enough to
    say how long a plan takes. What is known is kept, for the number of steps follows from it. New arms are measured
    together with the others, since only times taken in turns compare, and put in proportion to what is known of those.
    """
    costs = {name: computation(arm, decides) for name, arm in arms.items()}
    keys = {name: f"{costs[name]} {arm.identity['source_hash'][:16]} {machine()}" for name, arm in arms.items()}
    distinct = {keys[name]: arm for name, arm in arms.items()}  # arms that compute the same take the same time
    if distinct.keys() - known.keys():
        log.info("measuring a training step of each arm")
        timers = [real_step(arm) if decides else bare_step(arm) for arm in distinct.values()]
        found = dict(zip(distinct, calibrate(timers), strict=True))
        scale = statistics.median([known[key] / seconds for key, seconds in found.items() if key in known] or [1])
        known = {key: seconds * scale for key, seconds in found.items()} | known
    for name, arm in arms.items():
        arm.seconds_per_step = known[keys[name]]
    return known


@cache
def machine() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, {platform.machine()}, {cpu_name()}, {os.cpu_count()} cores, {gpu}"


def real_step(arm: Arm) -> Callable[[], float]:
    return TimedTraining(arm.run, arm.steps["own"])


def bare_step(arm: Arm) -> Callable[[], float]:
    """A step without a Trainer, with its share of validations, in which a forward pass is a third of a step."""
    step, steps, whole = TimedStep(arm.run, arm.vocab_size), arm.steps["own"], n_batches(arm.run, arm.val_tokens)
    passes = n_validations(arm.run, steps) * min(arm.run.validation.batches or whole, whole)
    return lambda: step() * (1 + passes / steps / 3)


def calibrate(steps: list[Callable[[], float]]) -> list[float]:
    """Seconds of a training step of each arm, from rounds in which the arms take turns.

    Taking turns, they share whatever else the machine is doing: each is the median, over the rounds, of its ratio to
    the first arm, times the median of the first.
    """
    for step in steps:
        step()  # warms up
    started = time.perf_counter()
    rounds: list[list[float]] = []  # seconds of every arm
    with tqdm(total=1.0, desc="measuring steps", leave=False, disable=None, bar_format="{desc} |{bar}|") as bar:
        while (done := progress(len(rounds), time.perf_counter() - started)) < 1:
            bar.update(done - bar.n)
            rounds.append([step() for step in steps])
    first = statistics.median(times[0] for times in rounds)
    return [first * statistics.median(times[i] / times[0] for times in rounds) for i in range(len(steps))]


def progress(rounds: int, seconds: float) -> float:
    """
    >>> progress(4, 99.0), progress(5, 10.0), progress(5, 20.0), progress(40, 3.0)
    (0.8, 0.5, 1.0, 1.0)
    """
    return min(1.0, rounds / FEWEST_ROUNDS, max(rounds / MOST_ROUNDS, seconds / LONG_ENOUGH))


def computation(arm: Arm, in_trainer: bool = False) -> str:
    """A hash of all that the cost of a step depends on; a split head is measured before its split."""
    run = resolve(arm.run, arm.vocab_size)
    trainer = replace(run.trainer, max_steps=1, enable_progress_bar=False)
    shape = (run.model, arm.vocab_size, run.data.batch_size, run.data.seq_len, run.data.document_mask, run.head.kind)
    how = (run.optim.name, run.optim.ns_steps, run.loss, run.activation_checkpointing, run.compile, trainer)
    beside = (run.threads, run.validation, arm.steps["own"], in_trainer)
    return hashlib.sha256(repr((shape, how, beside)).encode()).hexdigest()[:16]
