"""Batches to a run directory: loss, optimizers, schedule, callbacks, checkpoints, metrics.

In: a RunConfig. Out: a directory with config.yaml, metrics.csv, checkpoints/, model/ and result.json.
Imports lm.inference and the packages below it; torch and Lightning, and Hydra in `trainer` alone.
"""
