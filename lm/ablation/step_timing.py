"""What a training step of each arm costs on this machine: a bare one for a quick estimate, or one of the loop."""

import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from statistics import median

import torch

from lm.ablation.arms import Arm
from lm.config import RunConfig
from lm.config.identity import hashed_settings
from lm.data.tokens import TextData, prepare
from lm.inference.evaluate import validate
from lm.model.transformer import Transformer
from lm.system.device import cpu_name, fast_attention, is_mixed, set_threads
from lm.training.forecast import bare_step, batches_of_a_validation
from lm.training.resolve import build_model, n_validations, resolve

MIN_ROUNDS, ENOUGH_SECONDS = 5, 20.0  # of a measurement
MAX_ROUNDS, MAX_ROUNDS_OF_AN_ESTIMATE = 40, 10
WARM_UP_STEPS, TIMED_STEPS = 2, 6  # optimizer steps of a measurement in the loop
TIMED_BATCHES = 4  # of a validation
LEARNING_RATES = ("optim.lr", "head.embedding_lr_multiplier", "head.head_lr_multiplier")
COST_FREE = ("seed", "head.name", "trainer.max_steps", *LEARNING_RATES)
log = logging.getLogger(__name__)


def measure(
    arms: Mapping[str, Arm], earlier: dict[str, float], with_trainer: bool, plan_only: bool = False
) -> dict[str, float]:
    """Give each arm its seconds per step; returns all that were ever measured, by computation, code and machine.

    With a time budget, steps of the training loop are measured (`with_trainer`), because the number of steps
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
        timers = [
            _trainer_step(arm) if with_trainer else bare_step(arm.run, arm.vocab_size, arm.val_tokens, arm.steps["own"])
            for arm in distinct.values()
        ]
        rounds = MAX_ROUNDS if with_trainer else MAX_ROUNDS_OF_AN_ESTIMATE
        measured = dict(zip(distinct, time_in_turns(timers, rounds), strict=True))
        scale = median([earlier[key] / seconds for key, seconds in measured.items() if key in earlier] or [1])
        earlier = {key: seconds * scale for key, seconds in measured.items()} | earlier
    for name, arm in arms.items():
        arm.seconds_per_step = earlier[keys[name]]
    return earlier


def time_in_turns(steps: list[Callable[[], float]], max_rounds: int = MAX_ROUNDS) -> list[float]:
    """Seconds of a training step of each arm, from rounds in which the arms take turns.

    Taking turns, they share whatever else the machine is doing: each is the median, over the rounds, of its ratio to
    the first arm, times the median of the first.
    """
    for step in steps:
        step()  # warms up
    started = time.perf_counter()
    rounds: list[list[float]] = []  # seconds of every arm
    while len(rounds) < MIN_ROUNDS or (len(rounds) < max_rounds and time.perf_counter() - started < ENOUGH_SECONDS):
        rounds.append([step() for step in steps])
    first = median(times[0] for times in rounds)
    return [first * median(times[i] / times[0] for times in rounds) for i in range(len(steps))]


@cache
def machine() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, {platform.machine()}, {cpu_name()}, {os.cpu_count()} cores, {gpu}"


def _computation(arm: Arm, with_trainer: bool) -> str:
    """What the cost of a step depends on: all settings but those without a cost, the code and the machine."""
    settings = {key: value for key, value in hashed_settings(asdict(arm.run)).items() if key not in COST_FREE}
    content = repr((sorted(settings.items()), arm.identity, arm.steps["own"], with_trainer))
    return f"{hashlib.sha256(content.encode()).hexdigest()[:16]} {machine()}"


# --- a step of the training loop


def _trainer_step(arm: Arm) -> Callable[[], float]:
    """A step with real batches and its share of validations. Checkpoints and the final score are not included."""
    data = prepare(arm.run.data, arm.run.tokenizer)
    run = resolve(arm.run, arm.vocab_size)
    validations = n_validations(run, arm.steps["own"]) / arm.steps["own"]
    net = build_model(run, arm.vocab_size, data.tokenizer.eot)

    def step() -> float:
        set_threads(arm.run.threads)
        seconds = median(_seconds_of_steps(net, run, data))
        return seconds + (validations * _seconds_of_a_validation(net, run, data) if validations else 0.0)

    return step


def _seconds_of_steps(net: Transformer, run: RunConfig, data: TextData) -> list[float]:
    """Seconds of each step after the first ones, which set up what later ones use again."""
    # Lightning takes seconds to import, and most plans need only bare steps
    from lm.training.setup import begin, build_fabric, training_stream
    from lm.training.train import train_step

    fabric, ends = build_fabric(run.trainer), []
    fabric.launch()
    model, state = begin(fabric, net, run)
    stream = training_stream(fabric, run, data)
    with fast_attention(run.trainer.accelerator, is_mixed(run.trainer.precision), run.data.seq_len):
        for _ in range(WARM_UP_STEPS + TIMED_STEPS):
            _, loss, norm = train_step(fabric, model, state, run, stream)
            loss.item(), norm.item()  # the device has caught up then
            ends.append(time.perf_counter())
    return [end - start for start, end in pairwise(ends[WARM_UP_STEPS - 1 :])]


def _seconds_of_a_validation(net: Transformer, run: RunConfig, data: TextData) -> float:
    n = batches_of_a_validation(run, len(data.val))
    timed = min(TIMED_BATCHES, n)
    started = time.perf_counter()
    validate(net, run, data, max_batches=timed)
    return (time.perf_counter() - started) * n / timed
