"""From the logits of a token to the token: argmax, or a sample. There is no softmax."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lm.config import UserError, require


@dataclass(slots=True, frozen=True, kw_only=True)
class Sampling:
    """How the next token follows from its logits. The default is greedy; `top_k` and `min_p` restrict a sample.

    top_k: only the k tokens of the largest logits. min_p: only tokens at least this many times as probable, at this
    temperature, as the most probable one (Nguyen et al., 2024). Raises UserError for a value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.temperature < math.inf, f"temperature={self.temperature}", "0 (greedy) or more")
        require(self.top_k is None or self.top_k >= 1, f"top_k={self.top_k}", "1 or more, or null for all tokens")
        require(0 <= self.min_p <= 1, f"min_p={self.min_p}", "0 (all tokens) to 1")
        if self.temperature == 0 and (self.top_k is not None or self.min_p):
            key = f"top_k={self.top_k}" if self.top_k is not None else f"min_p={self.min_p}"
            raise UserError(f"{key}: is for sampling, and temperature=0 is greedy; add temperature=1")

    def next_token(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Raw logits (..., V) to token ids (...): argmax, or above temperature 0 a sample by the Gumbel-max trick.

        argmax(logits + temperature * Gumbel noise) is distributed as softmax(logits / temperature) (Gumbel, 1954).
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float()
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[..., -1:], -torch.inf)
        if self.min_p:
            least = logits.amax(-1, keepdim=True) + self.temperature * math.log(self.min_p)
            logits = logits.masked_fill(logits < least, -torch.inf)
        uniform = torch.rand(logits.shape, generator=generator, device=logits.device).clamp_(min=1e-20)
        return (logits - self.temperature * uniform.log().neg().log()).argmax(-1)


GREEDY = Sampling()
