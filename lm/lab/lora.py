"""Low-rank adapters (LoRA): the only parameters that train in a model that has them."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from lm.config import user_classes
from lm.model.linear import Linear, is_adapter
from lm.model.transformer import Transformer


class LoRALinear(Linear):
    """Low-rank adaptation (Hu et al., 2021): x W^T + b + alpha/rank x A^T B^T.

    A: (rank, in_features), initialised as every Linear; B: (out_features, rank), zero at first, so that at first
    W and b decide the map. PEFT has the same names.

    >>> LoRALinear(2, 3, rank=1, alpha=1)(torch.zeros(4, 5, 2)).shape
    torch.Size([4, 5, 3])
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, rank: int, alpha: float) -> None:
        super().__init__(in_features, out_features, bias)
        self.scale = alpha / rank
        self.lora_A = Linear(in_features, rank, bias=False)
        self.lora_B = _ZeroLinear(rank, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.lora_B(self.lora_A(x))  # (..., in_features) -> (..., rank) -> (..., out_features)
        return super().forward(x) + self.scale * update  # (..., out_features)

    def merged(self) -> Tensor:
        """Return the one matrix (out_features, in_features) that computes the same."""
        return self.weight + self.scale * self.lora_B.weight @ self.lora_A.weight


class _ZeroLinear(Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


@torch.no_grad()
def merged(net: Transformer) -> Transformer:
    """Return a model of plain projections that computes the same.

    What has no adapter is shared with `net`, not copied.
    """
    weights = {name: tensor for name, tensor in net.state_dict().items() if not is_adapter(name)}
    for name, module in net.named_modules():
        if isinstance(module, LoRALinear):
            weights[f"{name}.weight"] = module.merged()
    config = replace(net.config, linear="linear", lora_rank=None, lora_alpha=None, lora_targets=None)
    with torch.device("cpu" if user_classes(config) else "meta"):  # a class may have tensors that no file holds
        plain = Transformer(config, net.head_config, vocab_size=net.vocab_size, seq_len=net.seq_len)
    plain.load_state_dict(weights, assign=True)
    plain.document_separator = net.document_separator
    return plain.to(net.embed.weight.device)
