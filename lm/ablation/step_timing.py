"""What a training step of each arm costs on this machine, for the estimates of a plan."""

import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from statistics import median

import torch

from lm.ablation.arms import Arm
from lm.config.identity import hashed_settings
from lm.system.device import cpu_name
from lm.training.forecast import bare_step

MIN_ROUNDS, MAX_ROUNDS, ENOUGH_SECONDS = 5, 10, 20.0  # of a measurement
LEARNING_RATES = ("optim.lr", "head.embedding_lr_multiplier", "head.head_lr_multiplier")
COST_FREE = ("seed", "head.name", "trainer.max_steps", *LEARNING_RATES)
log = logging.getLogger(__name__)


def measure(arms: Mapping[str, Arm], earlier: dict[str, float]) -> dict[str, float]:
    """Give each arm its seconds per step; returns all that were ever measured, by computation, code and machine."""
    keys = {name: _computation(arm) for name, arm in arms.items()}
    new = {keys[name]: arm for name, arm in arms.items() if keys[name] not in earlier}  # alike arms take the same time
    if new:
        log.info("measuring a training step of each arm")
        timers = [bare_step(arm.run, arm.vocab_size, arm.val_tokens, arm.steps["own"]) for arm in new.values()]
        earlier = earlier | dict(zip(new, time_in_turns(timers), strict=True))
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
    while len(rounds) < MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and time.perf_counter() - started < ENOUGH_SECONDS):
        rounds.append([step() for step in steps])
    first = median(times[0] for times in rounds)
    return [first * median(times[i] / times[0] for times in rounds) for i in range(len(steps))]


@cache
def machine() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, {platform.machine()}, {cpu_name()}, {os.cpu_count()} cores, {gpu}"


def _computation(arm: Arm) -> str:
    """What the cost of a step depends on: all settings but those without a cost, the code and the machine."""
    settings = {key: value for key, value in hashed_settings(asdict(arm.run)).items() if key not in COST_FREE}
    content = repr((sorted(settings.items()), arm.identity, arm.steps["own"]))
    return f"{hashlib.sha256(content.encode()).hexdigest()[:16]} {machine()}"
