"""The best of the validated models of a run, for a text that is read so often that the last one has overfitted."""

import math
from typing import Any

from torch import Tensor

from lm.formats.folder import saved_state
from lm.model.transformer import Transformer


class BestModel:
    """The step of the lowest val/loss so far, and a copy of the weights of that step where they are wanted.

    The weights are part of every checkpoint: a run that is resumed from one has the best model of its own past, and not
    one of steps that it makes again.
    """

    def __init__(self) -> None:
        self.step, self.loss = 0, math.inf  # of the best validation; step 0: there was none
        self.weights: dict[str, Tensor] = {}  # on the CPU

    def update(self, step: int, loss: float, net: Transformer | None) -> None:
        """Take a validation if its loss is the lowest so far, and the weights of `net`."""
        if loss < self.loss:
            self.step, self.loss = step, loss
            self.weights = copied_state(net) if net is not None else {}

    def load_into(self, net: Transformer) -> None:
        """Give `net` the best weights, if there are any."""
        if self.weights:
            net.load_state_dict(self.weights)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "loss": self.loss, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.loss, self.weights = state["step"], state["loss"], state["weights"]


def copied_state(net: Transformer) -> dict[str, Tensor]:
    """A copy of the weights of a model on the CPU."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in saved_state(net).items()}
