"""A linear layer that fails in a worker process of an ablation."""

import multiprocessing

import torch


class Brittle(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if multiprocessing.parent_process() is not None:
            raise RuntimeError("a crack | in the glass")
        return super().forward(x)
