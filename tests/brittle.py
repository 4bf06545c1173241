"""Linear layers that fail: in a worker process of an ablation, and for weights that are not finite."""

import multiprocessing

import torch


class Brittle(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if multiprocessing.parent_process() is not None:
            raise RuntimeError("a crack | in the glass")
        return super().forward(x)


class Finite(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta and not self.weight.isfinite().all():
            raise RuntimeError("no scale for this weight")
        return super().forward(x)
