"""The device, the precision and the number of threads to compute with."""

import math
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm.errors import require

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of the control group, as containers have one
MAX_FAST_SEQ_LEN = 512  # up to here, attention in bf16 on a CPU is faster as plain matmuls


def cores() -> int:
    """The number of cores that this process may use: its affinity, and the quota of its control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # "max 100000", or microseconds of CPU time in each period
        quota, period = CPU_QUOTA.read_text().split()
        allowed = min(allowed, math.ceil(int(quota) / int(period)))
    return max(1, allowed)


@cache
def cpu_name() -> str:
    """The model of the CPU, as the system calls it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def count_threads(threads: int | None) -> int:
    """The number of threads for torch: `threads`, else OMP_NUM_THREADS, else the number of cores.

    Raises UserError if that is not a number from 1 to 8 for each core: with many more, torch stalls or crashes.
    """
    text, limit = str(threads or os.environ.get("OMP_NUM_THREADS") or cores()).split(",")[0], 8 * cores()
    key = "threads" if threads else "OMP_NUM_THREADS"
    require(text.isdigit() and 1 <= int(text) <= limit, f"{key}={text}", f"a number of threads from 1 to {limit}")
    return int(text)


def busy() -> str:
    """That other programs share the cores, to be said beside a measured time; empty if they do not."""
    load = os.getloadavg()[0]
    return f", while it was busy (a load of {load:.0f} on {cores()} cores)" if load > cores() + 1 else ""


def set_threads(threads: int | None) -> int:
    """Let torch use `count_threads(threads)` threads; returns the number.

    On a CPU, results are equal bit for bit only for the same number of threads.
    """
    number = count_threads(threads)
    torch.set_num_threads(number)
    return number


def best_device() -> str:
    """cuda, mps or cpu: the first that is available."""
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


@cache
def has_native_bf16(device: str) -> bool:
    """Whether the device multiplies bf16 matrices faster than fp32: GPUs from Ampere on, and CPUs with AMX.

    AVX-512 BF16 alone counts where the CPU is not Intel's: a GEMM by it takes 1.7 times as long as in fp32 on Intel's
    (where AMX is switched off). Other CPUs emulate bf16. On MPS it was not measured.
    """
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device != "cpu":
        return False
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    intel = "Intel" in str(capabilities.get("cpu_name"))
    return bool(capabilities.get("amx_bf16") or (capabilities.get("avx512_bf16") and not intel))


def is_mixed(precision: object) -> bool:
    """Whether Lightning's name of a precision means matmuls in bf16."""
    return str(precision).startswith("bf16")


@contextmanager
def fast_attention(device: str, mixed: bool, seq_len: int) -> Iterator[None]:
    """A context in which attention runs as plain matmuls where that is faster: in bf16 on a CPU, for short contexts."""
    if device != "cpu" or not mixed or seq_len > MAX_FAST_SEQ_LEN:
        yield
        return
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # applies to CPUs too, despite its name
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of `device` and of the CPU.

    torch.manual_seed seeds every kind of device, and for each that is absent it formats a stack trace, which takes
    about three milliseconds.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
