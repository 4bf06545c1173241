"""Interleaved timing: the candidates run in turn, so that the machine's other load falls on all of them alike."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(slots=True, frozen=True)
class Measurement:
    """One row of the benchmark."""

    section: str
    name: str
    value: float
    unit: str
    reference: str = ""  # another implementation, or a limit
    reference_value: float | None = None  # in the same unit

    @property
    def ratio(self) -> float | None:
        return self.value / self.reference_value if self.reference_value else None


def alternate(
    candidates: Mapping[str, Callable[[], object]], seconds: float, at_least: int = 5
) -> dict[str, list[float]]:
    """Seconds of each call, round after round, after two warm-up calls of each candidate."""
    for call in candidates.values():
        call(), call()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < at_least:
        for name, call in candidates.items():
            wait()
            started = time.perf_counter()
            call()
            wait()
            times[name].append(time.perf_counter() - started)
    return times


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def paired(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Seconds of ours and of theirs: the median of theirs times the median ratio within a round, and that median."""
    middle = median(theirs)
    return middle * median(one / two for one, two in zip(ours, theirs, strict=True)), middle
