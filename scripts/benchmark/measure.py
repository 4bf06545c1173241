"""Interleaved timing, and what the machine can do at most: GEMM throughput and memory bandwidth."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from lm.model.linear import linear
from lm.system.device import has_native_bf16

Calls = Mapping[str, Callable[[], object]]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


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
    """Seconds of each call, round after round, after two warm-up calls of each candidate.

    The candidates run in turn, so that the machine's other load falls on all of them alike.
    """
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
    """The first candidate beside each other one: the name of the reference, and the seconds of the two.

    The seconds of the first are the reference's median times the median ratio within a round.
    """
    first, *references = alternate(calls, seconds, at_least).items()
    for name, times in references:
        yield name, median(times) * median_ratio(first[1], times), median(times)


def median_ratio(times: list[float], references: list[float]) -> float:
    """A machine that is slower for a while changes the times of a round, not their ratio."""
    return median(mine / other for mine, other in zip(times, references, strict=True))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- limits


def limits(device: str, seconds: float) -> Iterator[Measurement]:
    for dtype in precisions(device):
        gemm = Gemm(device, dtype)
        flops = gemm.flops / median(alternate({"GEMM": gemm}, seconds)["GEMM"])
        yield Measurement("limits", f"GEMM throughput, {NAMES[dtype]}", flops / 1e9, "GFLOP/s")
    read = MemoryRead(device)
    bandwidth = read.weights.nbytes / median(alternate({"read": read}, seconds)["read"])
    yield Measurement("limits", "memory bandwidth", bandwidth / 1e9, "GB/s")


def precisions(device: str) -> list[torch.dtype]:
    """The precisions in which training steps are measured: those that are in use on this device."""
    cpu = [torch.float32] if device == "cpu" else []
    return cpu + [torch.bfloat16] * has_native_bf16(device)


class Gemm:
    """Each call multiplies two large square matrices."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        n = 8192 if device == "cuda" else 1536
        self.a, self.b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        self.flops = 2 * n**3

    def __call__(self) -> None:
        torch.matmul(self.a, self.b)


class MemoryRead:
    """Each call reads 256 MB of weights, more than any cache holds, as decoding does: a vector times each matrix.

    On a GPU it is one of 1 GB, for of small ones it would measure the time between two kernels.
    """

    def __init__(self, device: str) -> None:
        n, rows = (1, 2**17) if device == "cuda" else (16, 2048)
        self.weights, self.x = torch.randn(n, rows, 2048, device=device), torch.randn(1, 2048, device=device)

    @torch.inference_mode()
    def __call__(self) -> None:
        for weight in self.weights:
            linear(self.x, weight)
