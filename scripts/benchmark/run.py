"""benchmark(config) runs the sections, prints each row as soon as it is measured and returns the whole table."""

import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from lm.errors import check_output, check_settings, expand_paths, require_choice
from lm.system.device import best_device, set_threads
from lm.system.files import write_text
from lm.system.terminal import format_table

from .busy import busy
from .data import data
from .decoding import decoding
from .loss import loss_memory
from .measure import Measurement, limits
from .models import read_nanogpt
from .training import training

SECTIONS: dict[str, Callable[..., Iterator[Measurement]]] = {  # of the device and the seconds for each comparison
    "limits": limits,
    "training": training,
    "decoding": decoding,
    "loss": loss_memory,
    "data": data,
    "busy": busy,
}
HEAD = ("section", "measurement", "value", "unit", "reference", "its value", "ratio")


@dataclass(slots=True, kw_only=True)
class BenchmarkConfig:
    only: list[str] | None = None  # sections; null: all
    seconds: float = 10.0  # for each comparison, at least; a longer time gives less noise
    output: str | None = None  # a file for the measurements as JSON
    threads: int | None = None  # null: OMP_NUM_THREADS, else the number of cores
    nanogpt: str | None = None  # a clone of nanoGPT, for its training step beside the step of lm

    def __post_init__(self) -> None:
        for name in self.only or ():
            require_choice("only", name, tuple(SECTIONS))
        expand_paths(self, "output", "nanogpt")
        if self.output is not None:
            check_output(Path(self.output), "output")
        check_settings("", self, "threads")


def benchmark(config: BenchmarkConfig) -> str:
    """The table of measurements. The file `output`, if given, gets them as JSON."""
    threads, device = set_threads(config.threads), best_device()
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    where = f"torch {torch.__version__}, {name}, {device}, {threads} threads"
    nanogpt = read_nanogpt(config.nanogpt) if config.nanogpt is not None else None
    sections = SECTIONS | {"training": partial(training, nanogpt=nanogpt)}
    rows: list[Measurement] = []
    for section in config.only or SECTIONS:
        set_threads(threads)  # the section before may have changed it
        for row in sections[section](device, config.seconds):
            print(*(word for word in _cells(row) if word), sep="  ", file=sys.stderr, flush=True)
            rows.append(row)
        if config.output:
            content = {"where": where, "measurements": [asdict(row) | {"ratio": row.ratio} for row in rows]}
            write_text(Path(config.output), json.dumps(content, indent=1) + "\n")
    return f"{format_table([HEAD, *map(_cells, rows)])}\n\n{where}"


def _cells(row: Measurement) -> tuple[str, ...]:
    reference, ratio = ("" if value is None else f"{value:,.4g}" for value in (row.reference_value, row.ratio))
    return (row.section, row.name, f"{row.value:,.4g}", row.unit, row.reference, reference, ratio)
