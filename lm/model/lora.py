"""Low-rank adapters of a finished model's projections: the only parameters that train in a model that has them."""

from torch import Tensor, nn

from lm.model.linear import Linear


class LoRALinear(Linear):
    """Low-rank adaptation (Hu et al., 2021): x W^T + b + alpha/rank x A^T B^T.

    A: (rank, in_features), initialised as every Linear; B: (out_features, rank), zero at first, so that the map begins
    as that of W and b. The names are those of PEFT.

    >>> import torch
    >>> LoRALinear(2, 3, rank=1, alpha=1)(torch.zeros(4, 5, 2)).shape
    torch.Size([4, 5, 3])
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, rank: int, alpha: float) -> None:
        super().__init__(in_features, out_features, bias)
        self.scale = alpha / rank
        self.lora_A = Linear(in_features, rank, bias=False)
        self.lora_B = ZeroLinear(rank, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.lora_B(self.lora_A(x))
        return super().forward(x) + self.scale * update

    def merged(self) -> Tensor:
        """The one matrix (out_features, in_features) that computes the same."""
        return self.weight + self.scale * self.lora_B.weight @ self.lora_A.weight


class ZeroLinear(Linear):
    """A Linear initialised to zero."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name is one of an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def freeze_base(net: nn.Module) -> None:
    """Let only adapters train, in a model that has some."""
    if any(isinstance(module, LoRALinear) for module in net.modules()):
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(is_adapter(name))
