"""What to compute on, and in which precision."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm.config import BadInput

SHORT = 512  # tokens up to which attention in bf16 on a CPU is faster as plain products


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(threads: int | None) -> int:
    """Use this many threads in matrix products (None: OMP_NUM_THREADS, else the cores); returns the count.

    On a CPU, results are equal bit for bit only at an equal count. Raises BadInput if OMP_NUM_THREADS is no count.
    """
    wanted = str(threads or os.environ.get("OMP_NUM_THREADS") or cores()).split(",")[0]
    if not wanted.isdigit() or int(wanted) < 1:
        raise BadInput(f"OMP_NUM_THREADS={wanted}: expected a number of threads, 1 or more")
    torch.set_num_threads(int(wanted))
    return int(wanted)


def best_device() -> str:
    """cuda, mps or cpu: the first that is there."""
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


@cache
def has_native_bf16(device: str) -> bool:
    """Whether products in bf16 are much faster there than in fp32: on a GPU, on a CPU with AVX-512 BF16 or AMX.

    Without such units torch makes them of other instructions, which takes longer than fp32.
    """
    if device != "cpu":
        return True
    known: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def is_mixed(precision: object) -> bool:
    """Whether Lightning's name of a precision means products in bf16."""
    return str(precision).startswith("bf16")


@contextmanager
def quick_attention(device: str, mixed: bool, seq_len: int) -> Iterator[None]:
    """Where it is faster, attention as plain products: on a CPU in bf16, torch's fused kernel takes up to three times
    as long for short contexts."""
    if device != "cpu" or not mixed or seq_len > SHORT:
        yield
        return
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # for a CPU too, whatever its name says
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)


def seed_draws(seed: int, device: torch.device) -> None:
    """Set what draws on `device` and on the CPU begin from.

    torch.manual_seed does this for every kind of device there might be, and for each that is absent it formats a stack
    trace: about three milliseconds a step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
