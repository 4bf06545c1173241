"""benchmark(config): every section, as lines while they come and as JSON at the end."""

import json
import logging
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from lm.benchmark.compiled import compiled
from lm.benchmark.decoding import decoding, own_text
from lm.benchmark.limits import limits
from lm.benchmark.loss import loss
from lm.benchmark.measure import Figure
from lm.benchmark.nanogpt import nanogpt, their_model
from lm.benchmark.optimizer import optimizer
from lm.benchmark.product import product
from lm.benchmark.scale import scale
from lm.benchmark.starts import starts
from lm.benchmark.trainer import trainer
from lm.benchmark.training import training
from lm.benchmark.workers import workers
from lm.config.benchmark import BenchmarkConfig
from lm.system.device import best_device, set_threads
from lm.system.files import write_text
from lm.system.table import table

Section = Callable[[str, float], Iterator[Figure]]
SECTIONS: dict[str, Section] = {
    "limits": limits,
    "training": training,
    "nanogpt": nanogpt,
    "compile": compiled,
    "loss": loss,
    "trainer": trainer,
    "optimizer": optimizer,
    "product": product,
    "decoding": decoding,
    "workers": workers,
    "scale": scale,
    "starts": starts,
}


def benchmark(config: BenchmarkConfig) -> str:
    """The table of figures; `output` gets them as JSON."""
    logging.disable(logging.WARNING)
    threads, device = set_threads(config.threads), best_device()
    where = f"torch {torch.__version__}, {platform.machine()}, {device}, {threads} threads"
    own = own_text(config.run_dir) if config.run_dir is not None else None
    theirs = their_model(config.nanogpt) if config.nanogpt is not None else None
    beside = {"decoding": partial(decoding, own=own), "nanogpt": partial(nanogpt, theirs=theirs)}
    sections = SECTIONS | beside
    figures: list[Figure] = []
    for name in config.only or sections:
        set_threads(threads)  # the section before may have set them for itself
        for figure in sections[name](device, config.seconds):
            print(*(word for word in row(figure) if word), sep="  ", file=sys.stderr, flush=True)
            figures.append(figure)
        if config.output:
            found = {"where": where, "figures": [asdict(figure) | {"ratio": figure.ratio} for figure in figures]}
            write_text(Path(config.output).expanduser(), json.dumps(found, indent=1) + "\n")
    return f"{table([HEAD, *map(row, figures)])}\n\n{where}"


HEAD = ("section", "what", "measured", "unit", "beside", "its value", "ratio")


def row(one: Figure) -> tuple[str, ...]:
    other, ratio = ("" if value is None else f"{value:,.4g}" for value in (one.other, one.ratio))
    return (one.section, one.what, f"{one.value:,.4g}", one.unit, one.beside, other, ratio)
