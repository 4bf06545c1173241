"""The device, the precision and the number of threads to compute with."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm.config import expect

MOST_THREADS = 8  # for each core; with many more, torch stalls the machine or crashes
MAX_FAST_SEQ_LEN = 512  # up to here, attention in bf16 on a CPU is faster as plain matmuls


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def cpu_name() -> str:
    """The model of the CPU, as the system calls it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def set_threads(threads: int | None) -> int:
    """Let torch use this many threads (None: OMP_NUM_THREADS, else the number of cores); returns the number.

    On a CPU, results are equal bit for bit only for the same number of threads. Raises BadInput if OMP_NUM_THREADS is
    not a positive integer, and for more than MOST_THREADS for each core.
    """
    key, most = "threads" if threads else "OMP_NUM_THREADS", MOST_THREADS * cores()
    wanted = str(threads or os.environ.get("OMP_NUM_THREADS") or cores()).split(",")[0]
    expect(wanted.isdigit() and int(wanted) >= 1, f"{key}={wanted}", "a number of threads, 1 or more")
    limit = f"at most {most}, {MOST_THREADS} for each core that may be used here"
    expect(int(wanted) <= most, f"{key}={wanted}", limit)
    torch.set_num_threads(int(wanted))
    return int(wanted)


def best_device() -> str:
    """cuda, mps or cpu: the first that is available."""
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


@cache
def has_native_bf16(device: str) -> bool:
    """Whether the device is taken to multiply bf16 matrices faster than fp32: every GPU, and CPUs with AMX.

    AVX-512 BF16 alone counts where the CPU is not Intel's: a GEMM by it takes 1.7 times as long as in fp32 on Intel's
    (where AMX is switched off). Other CPUs emulate bf16; GPUs before Ampere do too, but are not detected.
    """
    if device != "cpu":
        return True
    known: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(known.get("amx_bf16") or (known.get("avx512_bf16") and "Intel" not in str(known.get("cpu_name"))))


def is_mixed(precision: object) -> bool:
    """Whether Lightning's name of a precision means matmuls in bf16."""
    return str(precision).startswith("bf16")


@contextmanager
def fast_attention(device: str, mixed: bool, seq_len: int) -> Iterator[None]:
    """A context in which attention runs as plain matmuls where that is faster: in bf16 on a CPU, for short contexts.

    torch's fused kernel takes up to three times as long there.
    """
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
