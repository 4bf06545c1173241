"""What a run reports while it trains: a row of metrics.csv for each logged step, a line for each validation."""

import csv
import io
import os
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from tqdm import tqdm

from lm.config import BadInput
from lm.config.checks import reading
from lm.data.tokens import TextData
from lm.inference.evaluate import Scores
from lm.system.files import write_text

COLUMNS = ("step", "tokens", "lr", "train/loss", "train/grad_norm", "val/loss", "val/bpb", "val/top1", "val/tokens")


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

    def __init__(self, path: Path, resumed_step: int, columns: tuple[str, ...] = COLUMNS) -> None:
        """Keep the rows of an existing file up to `resumed_step`; later steps will be logged again.

        Raises BadInput if the file begins with other columns.
        """
        super().__init__()
        self.path, self.columns = path, columns
        kept = [row for row in self.rows() if int(row["step"]) <= resumed_step] if resumed_step else []
        write_text(path, self.lines([dict(zip(columns, columns, strict=True)), *kept]))

    def rows(self) -> list[dict[str, str]]:
        """The rows that are there, without an incomplete one: the disk was full, or the power failed."""
        try:
            with reading(self.path), open(self.path, encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                if tuple(reader.fieldnames or ()) != self.columns:
                    raise BadInput(f"expected the columns {','.join(self.columns)}")
                return [row for row in reader if None not in (*row, *row.values()) and row["step"].isdecimal()]
        except FileNotFoundError:
            return []

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
