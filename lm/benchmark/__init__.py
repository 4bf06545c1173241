"""Speed and memory.

In: BenchmarkConfig, and on request a finished run or a clone of nanoGPT. Out: time, memory and throughput, each beside
a reference implementation or a limit of the machine. Imports lm.runs, lm.training and the packages below, not
lm.ablation.
"""
