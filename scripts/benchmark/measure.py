"""Interleaved timing: the candidates run in turn, so that the machine's other load falls on all of them alike."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import torch

Calls = Mapping[str, Callable[[], object]]


@dataclass(slots=True, frozen=True)
class Measurement:
    """One row of the table."""

    section: str
    name: str
    value: float
    unit: str
    reference: str = ""  # another implementation, or a limit
    reference_value: float | None = None  # in the same unit

    @property
    def ratio(self) -> float | None:
        return self.value / self.reference_value if self.reference_value else None


def alternate(calls: Calls, seconds: float, at_least: int = 5) -> dict[str, list[float]]:
    """Seconds of each call, round after round, after two warm-up calls of each candidate."""
    for call in calls.values():
        call(), call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < at_least:
        for name, call in calls.items():
            _wait()
            started = time.perf_counter()
            call()
            _wait()
            times[name].append(time.perf_counter() - started)
    return times


def compare(calls: Calls, seconds: float, at_least: int = 5) -> Iterator[tuple[str, float, float]]:
    """The first candidate beside each other one: the name of the reference, and the seconds of the two."""
    return beside(alternate(calls, seconds, at_least))


def beside(times: Mapping[str, list[float]]) -> Iterator[tuple[str, float, float]]:
    """As `compare`. The seconds of the first are the reference's median times the median ratio within a round."""
    first, *references = times.items()
    for name, column in references:
        yield name, median(column) * median_ratio(first[1], column), median(column)


def median_ratio(times: list[float], references: list[float]) -> float:
    """A machine that is slower for a while changes the times of a round, not their ratio."""
    return median(mine / other for mine, other in zip(times, references, strict=True))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
