"""Speed and memory on this machine, each beside a reference; scripts/benchmark.py runs the sections of run.py."""
