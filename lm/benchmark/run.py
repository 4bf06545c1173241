"""benchmark(config) runs the sections, prints each row as soon as it is measured and returns the whole table."""

import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from lm.benchmark.busy import busy
from lm.benchmark.compiled import compiled
from lm.benchmark.data import data
from lm.benchmark.decoding import decoding, run_prompts
from lm.benchmark.gemm import gemm
from lm.benchmark.growth import growth
from lm.benchmark.imported import imported
from lm.benchmark.limits import limits
from lm.benchmark.loss import loss
from lm.benchmark.measure import Measurement
from lm.benchmark.nanogpt import nanogpt, their_model
from lm.benchmark.optimizer import optimizer
from lm.benchmark.scale import scale
from lm.benchmark.startup import startup
from lm.benchmark.trainer import trainer
from lm.benchmark.training import documents, training
from lm.benchmark.workers import workers
from lm.config.benchmark import DEFAULT, BenchmarkConfig
from lm.system.device import best_device, set_threads
from lm.system.files import write_text
from lm.system.terminal import format_table

Section = Callable[[str, float], Iterator[Measurement]]
SECTIONS: dict[str, Section] = {
    "limits": limits,
    "training": training,
    "nanogpt": nanogpt,
    "compile": compiled,
    "loss": loss,
    "documents": documents,
    "trainer": trainer,
    "optimizer": optimizer,
    "gemm": gemm,
    "decoding": decoding,
    "workers": workers,
    "busy": busy,
    "scale": scale,
    "startup": startup,
    "data": data,
    "growth": growth,
    "import": imported,
}


def benchmark(config: BenchmarkConfig) -> str:
    """The table of measurements. The file `output`, if given, gets them as JSON."""
    threads, device = set_threads(config.threads), best_device()
    where = f"torch {torch.__version__}, {platform.machine()}, {device}, {threads} threads"
    run = run_prompts(config.run_dir) if config.run_dir is not None else None
    theirs = their_model(config.nanogpt) if config.nanogpt is not None else None
    sections = SECTIONS | {
        "decoding": partial(decoding, run=run),
        "nanogpt": partial(nanogpt, theirs=theirs),
        "busy": partial(busy, theirs=theirs),
    }
    found: list[Measurement] = []
    for name in config.only or DEFAULT:
        set_threads(threads)  # the section before may have changed it
        for one in sections[name](device, config.seconds):
            print(*(word for word in row(one) if word), sep="  ", file=sys.stderr, flush=True)
            found.append(one)
        if config.output:
            content = {"where": where, "measurements": [asdict(one) | {"ratio": one.ratio} for one in found]}
            write_text(Path(config.output).expanduser(), json.dumps(content, indent=1) + "\n")
    return f"{format_table([HEAD, *map(row, found)])}\n\n{where}"


HEAD = ("section", "measurement", "value", "unit", "reference", "its value", "ratio")


def row(one: Measurement) -> tuple[str, ...]:
    reference, ratio = ("" if value is None else f"{value:,.4g}" for value in (one.reference_value, one.ratio))
    return (one.section, one.name, f"{one.value:,.4g}", one.unit, one.reference, reference, ratio)
