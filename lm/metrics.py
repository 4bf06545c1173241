"""metrics.csv: one row per logged step, in order, also after a resume. It holds nothing that depends on the clock."""

import csv
import io
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger

from lm.files import write_text

COLUMNS = ("step", "tokens", "lr", "train/loss", "train/grad_norm", "val/loss", "val/bpb", "val/top1")


class MetricsFile(Logger):
    """A Lightning logger that appends, and never deletes what an interrupted run has written."""

    def __init__(self, path: Path, resumed_step: int, columns: tuple[str, ...] = COLUMNS) -> None:
        """Keep the rows up to `resumed_step`; later ones will be computed again."""
        super().__init__()
        self.path, self.columns = path, columns
        rows = []
        if resumed_step and path.exists():
            with open(path, newline="") as file:  # a row may be torn: the disk was full, the power went
                rows = [row for row in csv.DictReader(file) if None not in row.values() and row["step"].isdigit()]
        kept = [row for row in rows if int(row["step"]) <= resumed_step]
        write_text(path, self.lines([dict(zip(columns, columns, strict=True)), *kept]))

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

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """config.yaml has them."""

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""
