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

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # file of the control group: a container has such a group
MAX_FAST_SEQ_LEN = 512  # up to here, attention in bf16 on a CPU is faster as plain matmuls


@contextmanager
def default_state() -> Iterator[None]:
    """Let torch make fp32 tensors and record gradients, whatever a notebook has set before.

    The random numbers that the notebook draws afterwards on the CPU are the same as without this context.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.enable_grad(), torch.random.fork_rng([]):
            yield
    finally:
        torch.set_default_dtype(dtype)


def cores() -> int:
    """Return the number of cores that this process may use, by its affinity and the quota of its control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # "max 100000", or microseconds of CPU time in each period
        quota, period = CPU_QUOTA.read_text().split()
        allowed = min(allowed, math.ceil(int(quota) / int(period)))
    return max(1, allowed)


@cache
def cpu_name() -> str:
    """Return the model of the CPU, as the system names it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def count_threads(threads: int | None) -> int:
    """Return the number of threads for torch: `threads`, else OMP_NUM_THREADS, else the number of cores.

    OMP_NUM_THREADS may have been set for a host with more cores, so it counts up to the number of cores. Raises
    UserError for `threads` above 8 times the number of cores, with which torch stalls or crashes.
    """
    if threads:
        limit = 8 * cores()
        require(1 <= threads <= limit, f"threads={threads}", f"a number of threads from 1 to {limit}")
        return threads
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    is_number = text.isascii() and text.isdigit() and int(text) > 0
    require(is_number or not text, f"OMP_NUM_THREADS={text}", "a number of threads, 1 or more")
    return min(int(text), cores()) if text else cores()


def set_threads(threads: int | None) -> int:
    """Let torch use `count_threads(threads)` threads. Return this number.

    On a CPU, results are equal bit for bit only for the same number of threads.
    """
    number = count_threads(threads)
    torch.set_num_threads(number)
    return number


def best_device() -> str:
    """Return the first available device: cuda, mps or cpu."""
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


@cache
def has_native_bf16(device: str) -> bool:
    """Return whether the device multiplies bf16 matrices faster than fp32: GPUs from Ampere on, and CPUs with AMX.

    AVX-512 BF16 alone counts if the CPU is not from Intel. On a CPU from Intel (with AMX switched off), a GEMM with
    AVX-512 BF16 takes 1.7 times as long as a GEMM in fp32. Other CPUs emulate bf16. MPS was not measured.
    """
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device != "cpu":
        return False
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    intel = "Intel" in str(capabilities.get("cpu_name"))
    return bool(capabilities.get("amx_bf16") or (capabilities.get("avx512_bf16") and not intel))


def is_mixed(precision: object) -> bool:
    """Return whether Lightning's name of a precision means matmuls in bf16."""
    return str(precision).startswith("bf16")


@contextmanager
def fast_attention(device: str, mixed: bool, seq_len: int) -> Iterator[None]:
    """Run attention as plain matmuls inside this context if they are faster: in bf16 on a CPU, for short contexts."""
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

    torch.manual_seed seeds every kind of device. For each absent kind, torch.manual_seed formats a stack trace, for
    about three milliseconds.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
