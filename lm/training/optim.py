"""Optimizers, their parameter groups, and the learning rate as a pure function of the step."""

import math
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from lm.config import HeadConfig, OptimConfig
from lm.model.size import role
from lm.training.muon import Muon

LOW = 0.8  # a run whose rate never rises higher than this part of its peak has too long a warm-up


def lr_factor(step: int, total: int, config: OptimConfig) -> float:
    """The fraction of the peak rate at `step` of `total`: a linear warm-up times a decay, continuous at the joins."""
    warm_up = min(1.0, (step + 1) / (config.warmup_steps + 1))
    length = config.decay_fraction * total
    done = min(1.0, max(0.0, (step - (total - length)) / length)) if length else 0.0
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.decay]
    return warm_up * (config.final_lr_fraction + (1 - config.final_lr_fraction) * shape)


def peak_factor(total: int, config: OptimConfig) -> float:
    """The highest fraction of the rate that a run of `total` steps reaches: below 1 if its warm-up is long."""
    return max(lr_factor(step, total, config) for step in range(0, total, max(1, total // 1000)))


def parameter_groups(net: nn.Module, config: OptimConfig, head: HeadConfig) -> list[dict[str, Any]]:
    """Matrices of the body decay; the table and the head have rates of their own and, tied or not, never decay."""
    rest = config.lr if config.adam_lr is None else config.adam_lr
    groups: dict[str, dict[str, Any]] = {
        "body": {"params": [], "lr": config.lr, "weight_decay": config.weight_decay},
        "vectors": {"params": [], "lr": rest, "weight_decay": 0.0},
        "table": {"params": [], "lr": rest * head.embedding_lr_multiplier, "weight_decay": 0.0},
        "head": {"params": [], "lr": rest * (head.head_lr_multiplier or 0.0), "weight_decay": 0.0},
    }
    for name, parameter in net.named_parameters():
        part = role(name)
        matrix = part in ("attention", "ffn") and parameter.ndim >= 2
        groups[part if part in groups else "body" if matrix else "vectors"]["params"].append(parameter)
    return [{"name": name, **group} for name, group in groups.items() if group["params"]]


def step_flops(net: nn.Module, config: OptimConfig, head: HeadConfig) -> int:
    """Floating-point operations of the matrix products in one optimizer step: Muon's; AdamW has none."""
    body = (group["params"] for group in parameter_groups(net, config, head) if group["name"] == "body")
    shapes = [sorted(matrix.shape) for matrices in body for matrix in matrices]
    return (config.ns_steps or 0) * sum(4 * rows * rows * columns + 2 * rows**3 for rows, columns in shapes)


def build_optimizer(net: nn.Module, config: OptimConfig, head: HeadConfig) -> Optimizer:
    return OPTIMIZERS[config.name](net, config, head)


def adamw(net: nn.Module, config: OptimConfig, head: HeadConfig) -> Optimizer:
    """AdamW (Loshchilov and Hutter, 2017), torch's fused form."""
    groups = parameter_groups(net, config, head)
    return AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)


def muon_groups(net: nn.Module, config: OptimConfig, head: HeadConfig) -> list[dict[str, Any]]:
    own = {"momentum": config.momentum, "ns_steps": config.ns_steps}
    return [group | own if group["name"] == "body" else group for group in parameter_groups(net, config, head)]


def muon(net: nn.Module, config: OptimConfig, head: HeadConfig) -> Optimizer:
    """Muon for the matrices of the body, AdamW for the rest."""
    groups = muon_groups(net, config, head)
    return Muon(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)


OPTIMIZERS = {"adamw": adamw, "muon": muon}
