"""Measure how fast it is here: python scripts/benchmark.py [only=[training,decoding]] [seconds=30] [output=FILE]

Each measurement stands beside a reference implementation (transformers, from the dev extra; with nanogpt=DIR a clone of
nanoGPT), timed alternately with it, or beside a limit. Compare the ratios: the times depend on the current load of the
machine.
"""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code of this checkout

from lm.cli.arguments import parse, split_words, with_folders
from lm.cli.main import report_error
from lm.system.terminal import wrapped


def main() -> int:
    from benchmark.run import BenchmarkConfig, benchmark  # torch after lm, which says how its threads wait

    words = sys.argv[1:]
    if {"-h", "--help"} & {*words}:
        print(*(wrapped(" ".join(part.split())) for part in str(__doc__).strip().split("\n\n")), sep="\n\n")
        return 0
    try:
        sections, settings = split_words(words, BenchmarkConfig)
        config = parse(BenchmarkConfig, with_folders(sections, settings, "only"))
        logging.disable(logging.WARNING)  # of the libraries that are timed
        print(benchmark(config))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
