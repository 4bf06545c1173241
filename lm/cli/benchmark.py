"""Measure how fast it is here: lm-lab benchmark [only=[training,decoding]] [seconds=30] [output=FILE]

Each measurement stands beside a reference implementation (transformers, from the dev extra), timed alternately with it,
or beside a limit. Compare the ratios: the times depend on the current load of the machine.
"""

import logging

from lm.cli.imports import heavy_imports
from lm.cli.launch import launch
from lm.config.benchmark import BenchmarkConfig


def task(config: BenchmarkConfig) -> None:
    with heavy_imports():
        from lm.benchmark.run import benchmark

    logging.disable(logging.WARNING)  # of the libraries that are timed
    try:
        print(benchmark(config))
    finally:
        logging.disable(logging.NOTSET)


def main(line: list[str] | None = None) -> None:
    launch(task, BenchmarkConfig, "benchmark", line)
