"""Muon: momentum that is made orthogonal before it is added (Jordan et al., 2024).

A step then moves a matrix equally far in all its directions, not mostly along the few that dominate its gradient.
torch.optim.Muon does this one matrix after the other, in bfloat16. Here all matrices of a shape go through one batched
product, in bfloat16 where there are units for it, else in full precision: the default model's step takes half the time
on a CPU with such units and on one with AVX-512 alone, a twentieth with AVX2 (`benchmark.py only=[optimizer]`, under
ONEDNN_MAX_CPU_ISA).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from lm.system.device import has_native_bf16

# The iteration x -> a x + b (x x^T) x + c (x x^T)^2 x drives all singular values towards 1, fastest with
# coefficients of its own in each round: those of Polar Express (Amsel et al., 2025), for values above 0.001.
ROUNDS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.875, -1.25, 0.375),
)
SAFETY = 1.01  # so that rounding cannot push a singular value out of the range that the coefficients are for


def orthogonalise(x: Tensor, ns_steps: int) -> Tensor:
    """U V^T for every U S V^T of a batch (N, rows, columns) with rows <= columns, nearly: no SVD, only products."""
    x = x / (x.norm(dim=(1, 2), keepdim=True) * SAFETY + 1e-7)
    for a, b, c in ROUNDS[:ns_steps]:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(AdamW):
    """Muon for the groups that have `ns_steps`, AdamW, torch's own, for the rest: one optimizer with one state."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        with torch.no_grad():
            for group in groups:
                if "ns_steps" in group:
                    self.orthogonal_step(group)
        self.param_groups = [group for group in groups if "ns_steps" not in group]
        super().step()
        self.param_groups = groups
        return loss

    def orthogonal_step(self, group: dict[str, Any]) -> None:
        moved = [parameter for parameter in group["params"] if parameter.grad is not None]
        torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
        for shape, parameters in by_shape(moved).items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:  # under AdamW's names, for what it asks of a state when it is restored
                    self.state[parameter] |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter)}
            momenta = [self.state[parameter]["exp_avg"] for parameter in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov's look ahead
            stack = torch.stack([one.mT if one.shape != shape else one for one in ahead])
            quick = stack.bfloat16() if has_native_bf16(stack.device.type) else stack
            steps = orthogonalise(quick, group["ns_steps"]).to(stack.dtype)
            for parameter, step in zip(parameters, steps, strict=True):
                rows, columns = parameter.shape
                step = step if parameter.shape == shape else step.mT
                parameter.add_(step, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def by_shape(parameters: Iterable[Tensor]) -> dict[torch.Size, list[Tensor]]:
    """Matrices that can be stacked, lying down: (rows, columns) with rows <= columns to matrices of either shape."""
    found = defaultdict(list)
    for parameter in parameters:
        found[torch.Size(sorted(parameter.shape))].append(parameter)
    return dict(found)
