"""Settings: typed dataclasses, the names of choices, and the errors that a wrong setting raises.

In: what Hydra composes from the YAML files of `configs/`. Out: checked dataclasses; a wrong key or type is an error.
Imports the standard library alone: a mistake in a setting is reported before torch or Lightning is imported.
"""

from lm.config.checks import Diverged, UserError, require, require_min
from lm.config.commands import EvaluateConfig, ExportConfig, GenerateConfig
from lm.config.data import DataConfig, TokenizerConfig
from lm.config.model import FFNS, HEADS, NORM_ORDERS, NORMS, POSITIONS, HeadConfig, ModelConfig, foreign_classes
from lm.config.run import CheckpointConfig, DiagnosticsConfig, OptimConfig, RunConfig, TrainerConfig, ValidationConfig

__all__ = ["Diverged", "UserError", "foreign_classes", "require", "require_min"]
__all__ += ["FFNS", "HEADS", "NORMS", "NORM_ORDERS", "POSITIONS"]
__all__ += ["EvaluateConfig", "ExportConfig", "GenerateConfig", "RunConfig", "TokenizerConfig", "TrainerConfig"]
__all__ += ["CheckpointConfig", "DataConfig", "DiagnosticsConfig", "HeadConfig", "ModelConfig", "OptimConfig"]
__all__ += ["ValidationConfig"]
