"""Feed-forward networks: (B, T, D) to (B, T, D), each position separately."""

import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import ModelConfig
from lm.model.projection import projection


class FFN(nn.Module):
    """Up-project to d_ff, activate, down-project. A variant defines the activation in `hidden`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = projection(config, "up_proj")(config.d_model, config.d_ff, bias=config.bias)
        self.down_proj = projection(config, "down_proj")(config.d_ff, config.d_model, bias=config.bias)

    def hidden(self, x: Tensor) -> Tensor:
        """(B, T, D) to the activations (B, T, d_ff)."""
        raise NotImplementedError("a variant of FFN defines its activation")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.hidden(x))


class ReLU(FFN):
    def hidden(self, x: Tensor) -> Tensor:
        return F.relu(self.up_proj(x))


class GELU(FFN):
    """The exact form, with erf (Hendrycks and Gimpel, 2016)."""

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.up_proj(x))


class GELUTanh(FFN):
    """GELU in the approximation by tanh, as GPT-2 has it."""

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.up_proj(x), approximate="tanh")


class ReLU2(FFN):
    """The square of ReLU (So et al., Primer, 2021)."""

    def hidden(self, x: Tensor) -> Tensor:
        return F.relu(self.up_proj(x)).square()


class SwiGLU(FFN):
    """The up-projection times a SiLU gate (Shazeer, 2020). It has three matrices, so d_ff is usually 2/3 as large."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.gate_proj = projection(config, "gate_proj")(config.d_model, config.d_ff, bias=config.bias)

    def hidden(self, x: Tensor) -> Tensor:
        return F.silu(self.gate_proj(x)) * self.up_proj(x)


FFNS: dict[str, type[FFN]] = {"relu": ReLU, "gelu": GELU, "gelu_tanh": GELUTanh, "relu2": ReLU2, "swiglu": SwiGLU}
