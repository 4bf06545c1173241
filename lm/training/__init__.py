"""Batches to a run directory: the loop, loss, optimizers, schedule, checkpoints, metrics.

In: a RunConfig. Out: a directory with config.yaml, metrics.csv, checkpoints/, model/ and result.json.
Imports lm.scoring, lm.decoding and the modules below them; torch and Lightning, not Hydra.
"""
