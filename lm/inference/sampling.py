"""From the logits of a token to the token: argmax, or a sample. There is no softmax."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lm.config import UserError, require


@dataclass(slots=True, frozen=True, kw_only=True)
class Sampling:
    """How the next token follows from its logits. The default is greedy; the next three settings restrict a sample.

    top_k: only the k tokens of the largest logits. top_p: only the most probable tokens that together have at least
    this probability (Holtzman et al., 2020). min_p: only tokens at least this many times as probable as the most
    probable one (Nguyen et al., 2024). Probabilities are at this temperature. Raises UserError for a wrong value.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.temperature < math.inf, f"temperature={self.temperature}", "0 (greedy) or more")
        require(self.top_k is None or self.top_k >= 1, f"top_k={self.top_k}", "1 or more, or null for all tokens")
        require(0 < self.top_p <= 1, f"top_p={self.top_p}", "a number above 0, at most 1 (all tokens)")
        require(0 <= self.min_p <= 1, f"min_p={self.min_p}", "0 (all tokens) to 1")
        for key, neutral in (("top_k", None), ("top_p", 1), ("min_p", 0)):
            if self.temperature == 0 and (value := getattr(self, key)) != neutral:
                raise UserError(f"{key}={value}: is for sampling, and temperature=0 is greedy; add temperature=1")

    def next_token(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Raw logits (..., V) to token ids (...): argmax, or above temperature 0 a sample by the Gumbel-max trick.

        argmax(logits + temperature * Gumbel noise) is distributed as softmax(logits / temperature) (Gumbel, 1954).
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = self.restrict(logits.float())
        uniform = torch.rand(logits.shape, generator=generator, device=logits.device).clamp_(min=1e-20)
        return (logits - self.temperature * uniform.log().neg().log()).argmax(-1)

    def restrict(self, logits: Tensor) -> Tensor:
        """The logits (..., V), above temperature 0, with -inf for each token that may not be drawn."""
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[..., -1:], -torch.inf)
        if self.top_p < 1:
            descending = logits.sort(-1, descending=True).values
            cumulative = (descending / self.temperature).logcumsumexp(-1)  # log probability, but for a constant
            n_below = (cumulative < cumulative[..., -1:] + math.log(self.top_p)).sum(-1, keepdim=True)
            least = descending.gather(-1, n_below.clamp(max=logits.shape[-1] - 1))
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.min_p:
            least = logits.amax(-1, keepdim=True) + self.temperature * math.log(self.min_p)
            logits = logits.masked_fill(logits < least, -torch.inf)
        return logits


GREEDY = Sampling()
