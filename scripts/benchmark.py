"""How fast it is here: python scripts/benchmark.py [only=[training,decoding]] [seconds=30] [output=FILE]

Every figure stands beside a peer (transformers, from the dev extra), which takes turns with it in one process, or
beside a limit of the machine, measured in the same call: read the ratios, for the times are those of this moment.
"""

from lm.cli.imports import heavy_imports
from lm.cli.launch import launch
from lm.config.benchmark import BenchmarkConfig


def main(config: BenchmarkConfig) -> None:
    with heavy_imports():
        from lm.benchmark.run import benchmark

    print(benchmark(config))


if __name__ == "__main__":
    launch(main, BenchmarkConfig, "benchmark")
