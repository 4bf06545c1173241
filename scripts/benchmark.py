"""Measure how fast it is here: python scripts/benchmark.py [only=[training,decoding]] [seconds=30] [output=FILE]"""

from lm.cli.main import main

if __name__ == "__main__":
    main("benchmark")
