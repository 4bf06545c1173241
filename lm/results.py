"""Runs, curves and contrasts of folders as pandas frames: an index of lm/lab/results.py."""

from typing import Any

from lm.registry import from_lab


def __getattr__(name: str) -> Any:
    if name not in ("contrasts", "curves", "runs"):
        raise AttributeError(f"module 'lm.results' has no attribute {name!r}")
    return from_lab(f"lm.lab.results.{name}")
