"""Times of things that take turns, so that all share whatever else the machine is doing."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(slots=True, frozen=True)
class Figure:
    """One line of the benchmark."""

    section: str
    what: str
    value: float
    unit: str
    beside: str = ""  # the peer or the limit
    other: float | None = None  # its value, in the same unit

    @property
    def ratio(self) -> float | None:
        return self.value / self.other if self.other else None


def alternate(
    candidates: Mapping[str, Callable[[], object]], seconds: float, at_least: int = 5
) -> dict[str, list[float]]:
    """Seconds of each call, round after round, after two that warm up."""
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
    """Seconds of both: the median of theirs, and that times the median ratio within a round."""
    middle = median(theirs)
    return middle * median(one / two for one, two in zip(ours, theirs, strict=True)), middle
