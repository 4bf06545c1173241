"""A laboratory for small decoder-only language models.

>>> from lm import HeadConfig, ModelConfig, Transformer
>>> net = Transformer(ModelConfig(d_model=32, n_heads=2, d_ff=64), HeadConfig(), vocab_size=97, seq_len=16)
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm.cli.compose import run_config as run_config
    from lm.config import HeadConfig as HeadConfig
    from lm.config import ModelConfig as ModelConfig
    from lm.data.tokenizer import Tokenizer as Tokenizer
    from lm.data.tokenizer import load_tokenizer as load_tokenizer
    from lm.decoding import generate as generate
    from lm.decoding import stream as stream
    from lm.errors import UserError as UserError
    from lm.folder import load_model as load_model
    from lm.lab.ablation.compare import compare as compare
    from lm.lab.ablation.compare import judge as judge
    from lm.model.linear import Linear as Linear
    from lm.model.linear import linear as linear
    from lm.model.transformer import Transformer as Transformer
    from lm.training.train import train as train

__version__ = "0.3.0"

# How often a waiting thread of GNU's OpenMP looks for work before the thread sleeps; torch on Linux is
# built with GNU's OpenMP. With the default of OpenMP, a step beside another busy program takes many
# times as long (docs/performance.md). torch reads the variable once.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Public names and their modules. A module is imported on first use, because torch takes a second.
_MODULES = {
    "HeadConfig": "lm.config",
    "Linear": "lm.model.linear",
    "ModelConfig": "lm.config",
    "Tokenizer": "lm.data.tokenizer",
    "Transformer": "lm.model.transformer",
    "UserError": "lm.errors",
    "compare": "lm.lab.ablation.compare",
    "generate": "lm.decoding",
    "judge": "lm.lab.ablation.compare",
    "linear": "lm.model.linear",
    "load_model": "lm.folder",
    "load_tokenizer": "lm.data.tokenizer",
    "run_config": "lm.cli.compose",
    "stream": "lm.decoding",
    "train": "lm.training.train",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'lm' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
