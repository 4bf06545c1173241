"""A step of our Muon beside torch's, on the matrices of the default shape."""

from collections.abc import Iterator

import torch

from lm.benchmark.measure import Measurement, alternate, paired
from lm.benchmark.shapes import DEFAULT
from lm.config import HeadConfig, OptimConfig
from lm.training.optim import build_optimizer


def optimizer(device: str, seconds: float) -> Iterator[Measurement]:
    net = DEFAULT.build(device)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optim = OptimConfig(name="muon", lr=0.03, adam_lr=3e-3, momentum=0.9, ns_steps=4)
    ours = build_optimizer(net, optim, HeadConfig())
    ours.param_groups[:] = [group for group in ours.param_groups if "ns_steps" in group]
    theirs = torch.optim.Muon(ours.param_groups[0]["params"], lr=optim.lr, momentum=0.9, ns_steps=4)
    times = alternate({"ours": ours.step, "theirs": theirs.step}, seconds)
    own, other = paired(times["ours"], times["theirs"])
    yield Measurement("optimizer", "Muon step, default", 1000 * own, "ms", "torch.optim.Muon", 1000 * other)
