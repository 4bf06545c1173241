"""Measure how fast it is here: lm-lab benchmark [only=[training,decoding]] [seconds=30] [output=FILE]

Each measurement stands beside a reference, which takes turns with it in one process (transformers, from the dev extra),
or beside a limit of the machine, measured by the same call. Compare the ratios: the times are those of this moment.
"""

from lm.cli.imports import heavy_imports
from lm.cli.launch import launch
from lm.config.benchmark import BenchmarkConfig


def task(config: BenchmarkConfig) -> None:
    with heavy_imports():
        from lm.benchmark.run import benchmark

    print(benchmark(config))


def main(line: list[str] | None = None) -> None:
    launch(task, BenchmarkConfig, "benchmark", line)
