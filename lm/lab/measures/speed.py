"""The time of a training step on this machine: for max_minutes, and for the estimates of an ablation."""

import math
import time
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from lm.config import RunConfig
from lm.data.tokens import TextData
from lm.system.device import fast_attention, is_mixed, set_threads
from lm.training.log import TIMED_STEPS
from lm.training.loss import LossOf
from lm.training.optim import build_optimizer
from lm.training.resolve import build_model


def seconds_per_step(run: RunConfig, data: TextData) -> float:
    """Return the median seconds of TIMED_STEPS optimizer steps of a resolved run on random tokens, after a warm-up.

    The steps train a new model. The seconds include the share of the validations of a step: a forward pass of a
    validation counts as a third of a step.
    """
    device, mixed = run.trainer.accelerator, is_mixed(run.trainer.precision)
    n_micro, vocab_size = run.trainer.accumulate_grad_batches, data.tokenizer.vocab_size
    net = build_model(run, vocab_size).to(device)
    net.head.on_train_step(0.0, net.embed.weight, {})
    loss, optimizer = LossOf(net, run), build_optimizer(net, run.optim, run.head)
    shape = (run.data.batch_size // n_micro, run.data.seq_len)
    tokens = torch.randint(vocab_size, shape, device=device)  # (B, T)
    targets = F.one_hot(tokens, net.vocab_size).float() if run.ngram_smoothing else tokens
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    passes = 0.0  # forward passes of validation for each step
    if run.validation.every:
        n_batches = math.ceil(len(data.val) / (run.data.batch_size * run.data.seq_len))
        passes = min(run.validation.batches or n_batches, n_batches) / run.validation.every
    set_threads(run.threads)
    seconds = []
    for _ in range(1 + TIMED_STEPS):
        started = time.perf_counter()
        for _ in range(n_micro):
            with fast_attention(device, mixed, run.data.seq_len):
                with torch.autocast(device, torch.bfloat16, enabled=mixed):
                    value = loss(tokens, targets)
                value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:]) * (1 + passes / 3)
