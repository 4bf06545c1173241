"""What a training step of each arm costs on this machine, for the estimates of a plan."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from statistics import median

from lm.ablation.arms import Arm
from lm.config.identity import hashed_settings
from lm.training.forecast import bare_step

MIN_ROUNDS, MAX_ROUNDS, ENOUGH_SECONDS = 5, 10, 20.0  # of a measurement
LEARNING_RATES = ("optim.lr", "head.embedding_lr_multiplier", "head.head_lr_multiplier")
COST_FREE = ("seed", "head.name", "trainer.max_steps", *LEARNING_RATES)
log = logging.getLogger(__name__)


def measure(arms: Iterable[Arm]) -> None:
    """Give each arm its seconds per step; those of one computation take the same time."""
    alike: dict[str, list[Arm]] = {}
    for arm in arms:
        settings = {key: value for key, value in hashed_settings(asdict(arm.run)).items() if key not in COST_FREE}
        alike.setdefault(repr((sorted(settings.items()), arm.identity, arm.steps["own"])), []).append(arm)
    log.info("measuring a training step of each arm")
    firsts = [arm for arm, *_ in alike.values()]
    timers = [bare_step(arm.run, arm.vocab_size, arm.val_tokens, arm.steps["own"]) for arm in firsts]
    for same, seconds in zip(alike.values(), time_in_turns(timers), strict=True):
        for arm in same:
            arm.seconds_per_step = seconds


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
