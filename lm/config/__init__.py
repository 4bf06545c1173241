"""Settings: typed dataclasses, the names of choices, and the errors that a wrong setting raises.

In: what Hydra composes from the YAML files of `configs/`. Out: checked dataclasses; a wrong key or type is an error.
Imports the standard library alone: a mistake in a setting is reported before torch or Lightning is imported.
"""

from lm.config.checks import Diverged, UserError, require, require_choice, require_min, require_seed
from lm.config.commands import EvaluateConfig, ExportConfig, GenerateConfig, RunsConfig
from lm.config.data import SOURCES, TOKENIZERS, DataConfig, TokenizerConfig
from lm.config.model import CLASSES, FFNS, HEADS, NORMS, POSITIONS, HeadConfig, ModelConfig, foreign_classes
from lm.config.optim import DECAYS, OPTIMIZERS, OptimConfig
from lm.config.run import (
    LOSSES,
    CheckpointConfig,
    DiagnosticsConfig,
    LoggerConfig,
    RunConfig,
    TrainerConfig,
    ValidationConfig,
)

__all__ = [
    "CLASSES",
    "DECAYS",
    "FFNS",
    "HEADS",
    "LOSSES",
    "NORMS",
    "OPTIMIZERS",
    "POSITIONS",
    "SOURCES",
    "TOKENIZERS",
    "CheckpointConfig",
    "DataConfig",
    "DiagnosticsConfig",
    "Diverged",
    "EvaluateConfig",
    "ExportConfig",
    "GenerateConfig",
    "HeadConfig",
    "LoggerConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "RunsConfig",
    "TokenizerConfig",
    "TrainerConfig",
    "UserError",
    "ValidationConfig",
    "foreign_classes",
    "require",
    "require_choice",
    "require_min",
    "require_seed",
]
