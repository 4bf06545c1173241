"""Measure how fast it is here: lm-lab benchmark [only=[training,decoding]] [seconds=30] [output=FILE]

Each measurement stands beside a reference implementation (transformers, from the dev extra), timed alternately with it,
or beside a limit. Compare the ratios: the times depend on the current load of the machine.
"""

import logging

from lm.cli.compose import parse
from lm.config.benchmark import BenchmarkConfig

SCHEMA = BenchmarkConfig


def run(args: list[str]) -> None:
    config = parse(BenchmarkConfig, args)
    from lm.benchmark.run import benchmark

    logging.disable(logging.WARNING)  # of the libraries that are timed
    print(benchmark(config))
