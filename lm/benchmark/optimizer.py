"""A step of our Muon beside torch's, on the matrices of the default shape."""

from collections.abc import Iterator

import torch

from lm.benchmark.measure import Measurement, alternate, paired
from lm.benchmark.shapes import DEFAULT
from lm.config import HeadConfig, OptimConfig
from lm.training.muon import Muon
from lm.training.optim import muon_groups


def optimizer(device: str, seconds: float) -> Iterator[Measurement]:
    net = DEFAULT.build(device)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optim = OptimConfig(name="muon", lr=0.03, adam_lr=3e-3, momentum=0.9, ns_steps=4)
    (matrices,) = (group for group in muon_groups(net, optim, HeadConfig()) if "ns_steps" in group)
    theirs = torch.optim.Muon(matrices["params"], lr=optim.lr, momentum=0.9, ns_steps=4)
    times = alternate({"ours": Muon([matrices]).step, "theirs": theirs.step}, seconds)
    ours, other = paired(times["ours"], times["theirs"])
    yield Measurement("optimizer", "Muon step, default", 1000 * ours, "ms", "torch.optim.Muon", 1000 * other)
