"""Optimizers, their parameter groups, and the learning rate as a pure function of the step."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lm.config import HeadConfig, OptimConfig
from lm.model.size import role
from lm.system.device import has_native_bf16


def lr_factor(step: int, total: float, config: OptimConfig) -> float:
    """Return the learning rate at `step` of `total` as a fraction of its peak: a linear warm-up times a decay."""
    warm_up = min(1.0, (step + 1) / (config.warmup_steps + 1))
    length = config.decay_fraction * total
    progress = min(1.0, max(0.0, (step - (total - length)) / length)) if length else 0.0
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[config.decay]
    return warm_up * (config.final_lr_fraction + (1 - config.final_lr_fraction) * decay)


def parameter_groups(net: nn.Module, config: OptimConfig, head: HeadConfig) -> list[dict[str, Any]]:
    """Return the parameters in up to four groups, each group with its learning rate and weight decay.

    block_matrices: the 2-D parameters of the transformer blocks, the only group with weight decay; embedding; head;
    other: norms, biases, learned positions. The embedding and the head have no weight decay, tied or not. In a model
    with adapters, block_matrices are the matrices of the adapters. The other parameters of such a model do not train
    and are in no group.
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
        group = role(name)
        if group in ("attention", "ffn", "adapter") and parameter.ndim == 2:
            group = "block_matrices"
        elif group not in ("embedding", "head"):
            group = "other"
        groups[group]["params"].append(parameter)
    for name, options in groups.items():
        options |= {"name": name, "lr": config.lr_scale * options["lr"]}
        options["peak_lr"] = options["lr"]  # each step sets lr
    return [options for options in groups.values() if options["params"]]


def step_flops(net: nn.Module, config: OptimConfig, head: HeadConfig) -> int:
    """Return the floating-point operations of the matmuls of one optimizer step of Muon. AdamW has no matmul."""
    groups = parameter_groups(net, config, head)
    matrices = (matrix for group in groups if group["name"] == "block_matrices" for matrix in group["params"])
    shapes = [sorted(matrix.shape) for matrix in matrices]
    return (config.ns_steps or 0) * sum(4 * rows * rows * columns + 2 * rows**3 for rows, columns in shapes)


def build_optimizer(net: nn.Module, config: OptimConfig, head: HeadConfig) -> Optimizer:
    """Return AdamW (Loshchilov and Hutter, 2017), or Muon for the matrices of the blocks with AdamW for all else."""
    groups, betas = parameter_groups(net, config, head), (config.betas[0], config.betas[1])
    for group in groups:
        if config.name == "muon" and group["name"] == "block_matrices":
            group |= {"momentum": config.momentum, "ns_steps": config.ns_steps}
    return OPTIMIZERS[config.name](groups, betas=betas, eps=config.eps, fused=True)


# --- Muon

# The Newton-Schulz step x -> a x + b (x x^T) x + c (x x^T)^2 x drives all singular values towards 1. It converges
# fastest with different coefficients in each step: the coefficients of Polar Express (Amsel et al., 2025), for singular
# values above 0.001.
COEFFICIENTS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.875, -1.25, 0.375),
)
SAFETY = 1.01  # keeps rounding from pushing a singular value out of the range of the coefficients


def orthogonalise(x: Tensor, ns_steps: int) -> Tensor:
    """Return U V^T, approximately, for each U S V^T of a batch (N, rows, columns), rows <= columns: matmuls, no SVD."""
    x = x / (x.norm(dim=(1, 2), keepdim=True) * SAFETY + 1e-7)  # a gradient of zeros stays zero
    coefficients, s = [*COEFFICIENTS[:ns_steps]], SAFETY
    if ns_steps > 4:  # rounding to bfloat16 lifts singular values above 1, and undamped steps would raise them further
        coefficients[:-1] = ((a / s, b / s**3, c / s**5) for a, b, c in coefficients[:-1])
    for a, b, c in coefficients:
        gram = x @ x.mT  # (N, rows, rows), on the shorter side: the cheaper of the two products
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(AdamW):
    """Muon (Jordan et al., 2024) for the groups with `ns_steps` and `momentum`, fused AdamW for all other groups.

    Muon is momentum SGD whose updates are orthogonalised: an update changes a weight matrix by the same amount in every
    direction, instead of mostly along the few directions that dominate its gradient. torch.optim.Muon processes one
    matrix after another in bfloat16. Here all matrices of one shape share batched matmuls, in bfloat16 if the device
    supports bfloat16 natively, else in full precision. On the default model a step takes 0.2 to 0.8 of the time,
    depending on the CPU (docs/performance.md, Training).

    Parameters of Muon groups are 2-D. A step sets the gradients of these parameters to None. Both kinds of groups keep
    their average of gradients under `exp_avg`.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            if "ns_steps" in group:
                self._muon_step(group)
        super().step()

    def _muon_step(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        by_shape = defaultdict(list)  # (rows, columns), transposed where needed so that rows <= columns
        for matrix in parameters:
            by_shape[torch.Size(sorted(matrix.shape))].append(matrix)
        for shape, matrices in by_shape.items():
            for matrix in matrices:
                if not self.state[matrix]:  # load_state_dict of AdamW expects a step
                    self.state[matrix] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(matrix)}
            gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
            averages = [self.state[matrix]["exp_avg"] for matrix in matrices]
            torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
            nesterov = torch._foreach_lerp(gradients, averages, group["momentum"])
            stack = torch.stack([update.mT if update.shape != shape else update for update in nesterov])
            dtype = torch.bfloat16 if has_native_bf16(stack.device.type) else stack.dtype
            updates = orthogonalise(stack.to(dtype), group["ns_steps"]).to(stack.dtype)
            for matrix, update in zip(matrices, updates, strict=True):
                rows, columns = matrix.shape
                update = update if matrix.shape == shape else update.mT
                matrix.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)  # the factor of Jordan et al.
                matrix.grad = None  # AdamW leaves out a parameter without a gradient


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adamw": AdamW, "muon": Muon}
