"""The transformer: token ids (B, T) to raw logits (B, T, V), its initialisation and its size.

In: ModelConfig, HeadConfig, token ids. Out: logits, parameter counts, FLOPs per token.
Imports torch, lm.config, lm.errors and lm.registry: a notebook can use the package without Lightning and
Hydra.
"""

from lm.model.linear import Linear
from lm.model.transformer import KVCache, Transformer

__all__ = ["KVCache", "Linear", "Transformer"]
