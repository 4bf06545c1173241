"""What a run reports while it trains: a row of metrics.csv for each logged step, a line for each validation."""

import csv
import hashlib
import io
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from tqdm import tqdm

from lm.config import BadInput
from lm.data.tokens import TextData
from lm.inference.evaluate import Scores
from lm.system.files import read_regular, write_text

COLUMNS = ("step", "tokens", "lr", "train/loss", "train/grad_norm", "val/loss", "val/bpb", "val/top1", "val/tokens")

log = logging.getLogger(__name__)


def validation_metrics(scores: Scores, data: TextData) -> dict[str, float]:
    """Scores as columns. In bits per byte, an estimate takes the bytes per token of the whole text."""
    n_bytes = data.val_bytes * (scores.n_tokens / (len(data.val) - 1))
    bpb = scores.bpb(n_bytes)
    return {"val/loss": scores.loss, "val/bpb": bpb, "val/top1": scores.top1, "val/tokens": scores.n_tokens}


class BaseLogger(Logger):
    """What Lightning requires of every logger."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """They are in config.yaml."""

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def version(self) -> str:
        return ""


class ConsoleLogger(BaseLogger):
    """A line on standard error for each validation, above the progress bar if there is one."""

    def __init__(self, first_step: int, n_steps: int, val_tokens: int) -> None:
        """`val_tokens`: how many tokens of the validation text can be scored."""
        super().__init__()
        self.first_step, self.n_steps, self.val_tokens = first_step, n_steps, val_tokens
        self.started = time.perf_counter()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if step and "val/loss" in metrics:
            seconds = (time.perf_counter() - self.started) / max(1, step - self.first_step)
            losses = ", ".join(f"{key} {metrics[key]:.3f}" for key in ("train/loss", "val/loss") if key in metrics)
            scored = "all" if metrics["val/tokens"] == self.val_tokens else f"{metrics['val/tokens']:,} of"
            left = tqdm.format_interval((self.n_steps - step) * seconds)
            where = f"on {scored} {self.val_tokens:,} tokens"
            tqdm.write(f"step {step:,} of {self.n_steps:,}: {losses} {where}, {left} left", file=sys.stderr)


class MetricsFile(BaseLogger):
    """A CSV file with a row for each logged step, in order, also after a resume. It holds no times."""

    def __init__(
        self, path: Path, resumed_step: int, columns: tuple[str, ...] = COLUMNS, expected: str | None = None
    ) -> None:
        """Keep the rows of an existing file up to `resumed_step`; later steps will be logged again.

        `expected` is the hash of a file that holds them alone, if it is known. Raises BadInput if there are others,
        or if the file begins with other columns.
        """
        super().__init__()
        self.path, self.columns = path, columns
        kept = [row for row in self.rows() if int(row["step"]) <= resumed_step] if resumed_step else []
        if expected and self.hash_until(resumed_step) != expected:
            if kept:
                raise BadInput(f"{path}: was changed after step {resumed_step}; remove it to go on without its rows")
            log.warning("%s: has no rows up to step %d, as if it had been removed", path, resumed_step)
        write_text(path, self.lines([dict(zip(columns, columns, strict=True)), *kept]))

    def hash_until(self, step: int) -> str:
        """Of the file as it was when a checkpoint of this step was written, whatever columns it has."""
        content = self.path.read_bytes() if self.path.exists() else b""
        head, *lines = content.splitlines(keepends=True) or [b""]
        numbers = [line.partition(b",")[0] for line in lines]
        first = [line for line, number in zip(lines, numbers, strict=True) if number.isdigit() and int(number) <= step]
        whole = [line for line in first if line.endswith(b"\n")]  # the last one may have been cut off
        return hashlib.sha256(b"".join([head, *whole])).hexdigest()

    def rows(self) -> list[dict[str, str]]:
        """The rows that are there, without an incomplete one: the disk was full, or the power failed."""
        try:
            lines = list(csv.reader(io.StringIO(read_regular(self.path).decode(), newline="")))
            names = tuple(lines[0] if lines else ())
            if names != self.columns:
                raise ValueError(f"begins with {','.join(names)!r:.60}")
        except FileNotFoundError:
            return []
        except (ValueError, csv.Error) as error:
            expected = f"expected the columns {','.join(self.columns)}"
            raise BadInput(f"{self.path}: {error}; {expected}; remove it to go on without its rows") from error
        rows = [dict(zip(names, line, strict=True)) for line in lines[1:] if len(line) == len(names)]
        return [row for row in rows if row["step"].isdecimal()]

    def lines(self, rows: list[dict[str, Any]]) -> str:
        buffer = io.StringIO()
        csv.DictWriter(buffer, self.columns, lineterminator="\n", extrasaction="ignore").writerows(rows)
        return buffer.getvalue()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with open(self.path, "a", newline="") as file:
            file.write(self.lines([{"step": step, **metrics}]))

    def save(self) -> None:
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
