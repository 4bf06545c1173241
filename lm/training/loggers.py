"""The configured loggers of Lightning: built, told the settings of a run and its final scores, and closed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from lm.config import BadInput, RunConfig
from lm.config.identity import flat

FINAL = (  # of result.json
    *("val_loss", "val_bpb", "val_top1", "n_params", "flops_per_token"),
    *("steps", "tokens", "seconds", "tokens_per_second"),
)


def build_loggers(run: RunConfig, folder: Path) -> list[Any]:
    """The configured Lightning loggers, which write into the run directory."""
    try:
        return [instantiate(one, save_dir=str(folder)) for one in run.logger.values()]
    except Exception as error:
        raise BadInput(f"logger: {str(error.__cause__ or error).splitlines()[0]}") from error


@contextmanager
def with_settings(loggers: list[Any], settings: dict[str, Any]) -> Iterator[None]:
    """A context in which the loggers know the settings of config.yaml, by dotted keys.

    A run of Weights & Biases ends with it: the next run of a sweep would go on writing to it. Raises BadInput if a
    logger cannot begin, for example because nobody has logged in.
    """
    code = 1
    try:
        for logger in loggers:
            try:
                logger.log_hyperparams(loggable(settings))
            except Exception as error:
                raise BadInput(f"logger: {type(logger).__name__}: {str(error).splitlines()[0]}") from error
        yield
        code = 0
    finally:
        for logger in loggers:
            if isinstance(logger, WandbLogger) and logger._experiment is not None:
                logger.experiment.finish(code)


def log_result(loggers: list[Any], settings: dict[str, Any], result: dict[str, Any]) -> None:
    """The final scores, under their names in result.json."""
    scores, step = {key: result[key] for key in FINAL}, result["steps"]
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(loggable(settings), scores, step)  # its HParams take both together
        else:
            logger.log_metrics(scores, step)
        logger.finalize("success")


def loggable(settings: dict[str, Any]) -> dict[str, Any]:
    """Without the settings of the loggers, which may hold a password."""
    return {key: value for key, value in flat(settings).items() if not key.startswith("logger.")}
