"""One training step without a Trainer, for measurements of its cost."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.data.batches import Batch
from lm.system.device import fast_attention


def train_step(
    loss: Callable[[Tensor, Tensor], Tensor], optimizer: Optimizer, micro_batches: Iterable[Batch], mixed: bool = False
) -> None:
    """Forward, backward, clip at 1, update. `loss` maps token ids (B, T) and targets (B, T) to a scalar."""
    for tokens, targets in micro_batches:
        device = tokens.device.type
        with torch.autocast(device, torch.bfloat16, enabled=mixed), fast_attention(device, mixed, tokens.shape[1]):
            found = loss(tokens, targets)
        found.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_([parameter for group in optimizer.param_groups for parameter in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad()
