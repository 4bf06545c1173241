"""Optimizers, their parameter groups, and the learning rate as a pure function of the step."""

import math
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from lm.config import HeadConfig, OptimConfig
from lm.model.size import role
from lm.training.muon import Muon

MIN_PEAK_LR_FACTOR = 0.8  # a run whose learning rate peaks below this fraction of optim.lr has too long a warm-up


def lr_factor(step: int, total: int, config: OptimConfig) -> float:
    """The learning rate at `step` of `total` as a fraction of its peak: a linear warm-up times a decay."""
    warm_up = min(1.0, (step + 1) / (config.warmup_steps + 1))
    length = config.decay_fraction * total
    done = min(1.0, max(0.0, (step - (total - length)) / length)) if length else 0.0
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.decay]
    return warm_up * (config.final_lr_fraction + (1 - config.final_lr_fraction) * shape)


def peak_lr_factor(total: int, config: OptimConfig) -> float:
    """The largest `lr_factor` of a run of `total` steps: below 1 if the warm-up overlaps the decay."""
    return max(lr_factor(step, total, config) for step in range(0, total, max(1, total // 1000)))


def parameter_groups(net: nn.Module, config: OptimConfig, head: HeadConfig) -> list[dict[str, Any]]:
    """The parameters in up to four groups, each with its learning rate and weight decay.

    block_matrices: the 2-D parameters of the transformer blocks, the only group with weight decay; embedding; head;
    other: norms, biases, learned positions. The embedding and the head have no weight decay whether tied or not. Of a
    model with adapters, block_matrices are the adapters' matrices, and the other parameters, which do not train, are in
    no group.
    """
    adam_lr = config.lr if config.adam_lr is None else config.adam_lr
    head_lr = adam_lr if head.head_lr_multiplier is None else adam_lr * head.head_lr_multiplier
    groups: dict[str, dict[str, Any]] = {
        "block_matrices": {"params": [], "lr": config.lr, "weight_decay": config.weight_decay},
        "other": {"params": [], "lr": adam_lr, "weight_decay": 0.0},
        "embedding": {"params": [], "lr": adam_lr * head.embedding_lr_multiplier, "weight_decay": 0.0},
        "head": {"params": [], "lr": head_lr, "weight_decay": 0.0},
    }
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        part = role(name)
        if part not in groups:
            part = "block_matrices" if part in ("attention", "ffn", "adapter") and parameter.ndim == 2 else "other"
        groups[part]["params"].append(parameter)
    return [{"name": name, **group} for name, group in groups.items() if group["params"]]


def step_flops(net: nn.Module, config: OptimConfig, head: HeadConfig) -> int:
    """Floating-point operations of the matmuls of one optimizer step: those of Muon; AdamW has none."""
    groups = parameter_groups(net, config, head)
    matrices = (matrix for group in groups if group["name"] == "block_matrices" for matrix in group["params"])
    shapes = [sorted(matrix.shape) for matrix in matrices]
    return (config.ns_steps or 0) * sum(4 * rows * rows * columns + 2 * rows**3 for rows, columns in shapes)


def build_optimizer(net: nn.Module, config: OptimConfig, head: HeadConfig) -> Optimizer:
    return OPTIMIZERS[config.name](net, config, head)


def adamw(net: nn.Module, config: OptimConfig, head: HeadConfig) -> Optimizer:
    """AdamW (Loshchilov and Hutter, 2017), torch's fused implementation."""
    groups = parameter_groups(net, config, head)
    return AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)


def muon_groups(net: nn.Module, config: OptimConfig, head: HeadConfig) -> list[dict[str, Any]]:
    own = {"momentum": config.momentum, "ns_steps": config.ns_steps}
    groups = parameter_groups(net, config, head)
    return [group | own if group["name"] == "block_matrices" else group for group in groups]


def muon(net: nn.Module, config: OptimConfig, head: HeadConfig) -> Optimizer:
    """Muon for the matrices of the transformer blocks, AdamW for the other groups."""
    groups = muon_groups(net, config, head)
    return Muon(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps)


OPTIMIZERS = {"adamw": adamw, "muon": muon}
