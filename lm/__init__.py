"""A laboratory for small decoder-only language models.

>>> from lm import HeadConfig, ModelConfig, Transformer
>>> net = Transformer(ModelConfig(d_model=32, n_heads=2, d_ff=64), HeadConfig(), vocab_size=97, seq_len=16)
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# How often a thread of GNU's OpenMP, with which torch is built on Linux, looks for work before it sleeps. Its default
# keeps cores from other programs for milliseconds, and a step beside one takes many times as long. See
# docs/performance.md. It is read when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from lm.config import BadInput, HeadConfig, ModelConfig
    from lm.data.tokenizer import Tokenizer
    from lm.data.tokenizer_file import load_tokenizer
    from lm.exchange.portable import load_model
    from lm.inference.generate import generate, stream
    from lm.model.linear import Linear, linear
    from lm.model.transformer import Transformer

# Resolved on first use, so that a mistake in a configuration is reported before torch is imported.
HOMES = {
    **dict.fromkeys(("BadInput", "HeadConfig", "ModelConfig"), "lm.config"),
    "Tokenizer": "lm.data.tokenizer",
    "load_tokenizer": "lm.data.tokenizer_file",
    **dict.fromkeys(("generate", "stream"), "lm.inference.generate"),
    **dict.fromkeys(("Linear", "linear"), "lm.model.linear"),
    "Transformer": "lm.model.transformer",
    "load_model": "lm.exchange.portable",
}
__all__ = [
    "BadInput",
    "HeadConfig",
    "Linear",
    "ModelConfig",
    "Tokenizer",
    "Transformer",
    "generate",
    "linear",
    "load_model",
    "load_tokenizer",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'lm' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
