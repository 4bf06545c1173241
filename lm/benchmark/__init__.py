"""Comes in: BenchmarkConfig, and on request a finished run or a clone of nanoGPT.
Goes out: time, memory and throughput, each beside a reference implementation or a limit of the machine.
May import: everything but the ablation and the command line.
"""
