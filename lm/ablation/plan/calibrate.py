"""What a training step of each arm costs on this machine."""

import hashlib
import logging
import os
import platform
import statistics
import time

import torch

from lm.ablation.plan.arms import Arm, Arms
from lm.training.step import TimedStep
from lm.training.trainer import resolve

LONG_ENOUGH = 20.0  # seconds
MOST_ROUNDS = 40
log = logging.getLogger(__name__)


def measure(arms: Arms, known: dict[str, float]) -> dict[str, float]:
    """Give each arm its seconds per step; returns all that were ever measured, by computation, code and machine.

    What is known is kept, for the number of steps follows from it. New arms are measured together with the others,
    since only times taken in turns compare, and put in proportion to what is known of those.
    """
    keys = {name: f"{computation(arm)} {arm.identity['source_hash'][:16]} {machine()}" for name, arm in arms.items()}
    distinct = {keys[name]: arm for name, arm in arms.items()}  # arms that compute the same take the same time
    if distinct.keys() - known.keys():
        log.info("measuring a training step of each arm")
        found = dict(zip(distinct, calibrate(list(distinct.values())), strict=True))
        scale = statistics.median([known[key] / seconds for key, seconds in found.items() if key in known] or [1])
        known = {key: seconds * scale for key, seconds in found.items()} | known
    for name, arm in arms.items():
        arm.seconds_per_step = known[keys[name]]
    return known


def machine() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {gpu}"


def calibrate(arms: list[Arm]) -> list[float]:
    """Seconds of a training step of each arm, from rounds in which the arms take turns.

    Taking turns, they share whatever else the machine is doing: each is the median, over the rounds, of its ratio to
    the first arm, times the median of the first.
    """
    steps = [TimedStep(arm.run, arm.vocab_size) for arm in arms]
    for step in steps:
        step()  # warms up
    started = time.perf_counter()
    rounds: list[list[float]] = []  # seconds of every arm
    while len(rounds) < 5 or (len(rounds) < MOST_ROUNDS and time.perf_counter() - started < LONG_ENOUGH):
        rounds.append([step() for step in steps])
    first = statistics.median(times[0] for times in rounds)
    return [first * statistics.median(times[i] / times[0] for times in rounds) for i in range(len(arms))]


def computation(arm: Arm) -> str:
    """A hash of all that the cost of a step depends on; a split head is measured before its split."""
    run, options = arm.run, resolve(arm.run)
    trainer = sorted((key, value) for key, value in options.items() if key not in ("max_steps", "enable_progress_bar"))
    shape = (run.model, arm.vocab_size, run.data.batch_size, run.data.seq_len, run.data.document_mask, run.head.kind)
    how = (run.optim.name, run.optim.ns_steps, run.loss, run.activation_checkpointing, run.compile, trainer)
    return hashlib.sha256(repr((shape, how)).encode()).hexdigest()[:16]
