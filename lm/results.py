"""Runs, curves and contrasts of folders as pandas frames: an index of lm/lab/results.py."""

from lm.lab.results import contrasts, curves, runs

__all__ = ["contrasts", "curves", "runs"]
