"""What a run will take, before it is trained: its size, its memory and its time on this machine."""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from lm.config import RunConfig
from lm.config.identity import config_hash
from lm.data.tokens import TextData, prepare
from lm.model.size import n_params
from lm.system.device import busy, fast_attention, is_mixed, set_threads
from lm.training.loss import build_loss
from lm.training.optim import build_optimizer
from lm.training.resolve import build_model, check_memory, least_bytes, n_batches, n_validations, resolve
from lm.training.run_directory import RunDirectory, default_directory
from lm.training.state import checkpoints, step_of

TIMED_STEPS = 10
log = logging.getLogger(__name__)


def forecast(run: RunConfig) -> dict[str, Any] | None:
    """What training a run will take, or what is left of it; None where it is finished.

    Its steps are timed on one device with a copy of the model, so that no number of the run moves. Raises UserError for
    what this machine cannot do, and if the directory holds another run.
    """
    data = prepare(run.data, run.tokenizer, quiet=not sys.stderr.isatty())
    vocab_size, tokens = data.tokenizer.vocab_size, len(data.train)
    hashes = {"data_hash": data.hash, "tokenizer_hash": data.tokenizer.hash}
    directory = RunDirectory(Path(run.run_dir or default_directory(run, config_hash(run, *hashes.values()))))
    if directory.result.exists():
        return None
    as_begun, begun_steps = directory.as_begun(run)
    resolved = decide(as_begun, data)
    if run.max_minutes is not None and begun_steps:
        resolved = replace(resolved, trainer=replace(resolved.trainer, max_steps=begun_steps))
    done = max(map(step_of, checkpoints(directory.checkpoints)), default=0)
    if done:
        directory.check_same_run(asdict(resolved) | hashes)
    done = done if run.checkpoint.resume else 0
    with torch.device("meta"):
        net = build_model(resolved, vocab_size)
    first, seconds = _seconds_of_steps(resolved, data)
    steps = run.steps if run.max_minutes is None else begun_steps or max(round(60 * run.max_minutes / seconds), 1)
    return {
        "run_dir": str(directory.path),
        "vocab_size": vocab_size,
        "n_params": n_params(net),
        "train_text_tokens": tokens,
        "steps": steps,
        "steps_done": done,
        "devices": run.trainer.world_size,
        "busy": busy(),
        "readings": steps * run.tokens_per_step / tokens,
        "least_bytes": least_bytes(resolved, vocab_size),
        "seconds": max(first - seconds, 0) + (steps - done) * seconds,
    }


def decide(run: RunConfig, data: TextData) -> RunConfig:
    """The run as it is trained here: resolved, and without a compiler that compile=auto has chosen and that fails.

    A step is compiled on a copy of the model, so that no number of the run moves. Raises UserError for what this
    machine cannot do.
    """
    vocab_size = data.tokenizer.vocab_size
    resolved = resolve(run, vocab_size)
    check_memory(resolved, vocab_size)
    if run.compile != "auto" or not resolved.compile:
        return resolved
    log.info("compile=auto: so long a run is compiled first, which takes up to a minute")
    try:
        bare_step(resolved, vocab_size, 0, 1)()
    except Exception as error:  # whatever a compiler raises: what is wrong with the run itself will be raised again
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning("compile=auto: %s; the steps are not compiled", reason)
        return resolve(replace(run, compile=False), vocab_size)
    return resolved


def steps_of_minutes(run: RunConfig, data: TextData) -> int:
    """How many steps take the max_minutes of a run on this machine."""
    assert run.max_minutes is not None
    _, seconds = _seconds_of_steps(run, data)
    return max(round(60 * run.max_minutes / seconds), 1)


def _seconds_of_steps(run: RunConfig, data: TextData) -> tuple[float, float]:
    """Seconds of the first step, which warms up and compiles, and of a later one."""
    step = bare_step(run, data.tokenizer.vocab_size, len(data.val), run.steps)
    return step(), median(step() for _ in range(TIMED_STEPS))


def bare_step(run: RunConfig, vocab_size: int, val_tokens: int, steps: int) -> Callable[[], float]:
    """A step on random tokens, with its share of validations, in which a forward pass is a third of a step.

    It returns its seconds.
    """
    run = resolve(run, vocab_size)
    passes = n_validations(run, steps) * batches_of_a_validation(run, val_tokens)
    device, mixed = run.trainer.accelerator, is_mixed(run.trainer.precision)
    n_micro = run.trainer.accumulate_grad_batches
    net = build_model(run, vocab_size).to(device)
    net.head.on_train_step(0.0, net.embed.weight, {})
    loss, optimizer = partial(build_loss(run), net), build_optimizer(net, run.optim, run.head)
    tokens = torch.randint(vocab_size, (run.data.batch_size // n_micro, run.data.seq_len), device=device)

    def step() -> float:
        set_threads(run.threads)
        started = time.perf_counter()
        for _ in range(n_micro):
            with torch.autocast(device, torch.bfloat16, enabled=mixed), fast_attention(device, mixed, run.data.seq_len):
                value = loss(tokens, tokens)
            value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) * (1 + passes / steps / 3)

    return step


def batches_of_a_validation(run: RunConfig, n_tokens: int) -> int:
    n_all = n_batches(run, n_tokens)
    return min(run.validation.batches or n_all, n_all)
