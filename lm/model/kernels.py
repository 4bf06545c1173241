"""RMSNorm, dropout, and attention with dropout, each faster in training on a CPU than the function of torch.

Anywhere else (a GPU, torch.compile) the functions of torch are called. docs/performance.md has the measurements.
"""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK = 64  # queries of one matmul of attention; keys behind the last of these queries need no computing


def _is_eager_on_cpu(x: Tensor) -> bool:
    return x.is_cpu and not torch.compiler.is_compiling()


# --- RMSNorm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight over the last dimension, (..., D). x: (..., D); weight: (D,)."""
    if not _is_eager_on_cpu(x) or x.dtype == torch.float64:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)  # F.rms_norm needs one dtype, also under autocast
    constants = _constants(x.shape[-1], eps)
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, *constants)  # type: ignore[no-untyped-call]
    return _scale(x, _inverse_rms(x, *constants), weight)


@cache
@torch.inference_mode(False)
def _constants(width: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return sqrt(D) and sqrt(D eps) as tensors, because tensors need no conversion in each call."""
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    return torch.tensor(math.sqrt(width), **options), torch.tensor(math.sqrt(width * eps), **options)


def _inverse_rms(x: Tensor, sqrt_dim: Tensor, sqrt_dim_eps: Tensor) -> Tensor:
    """Return the inverse RMS of `x` (..., D) over the last dimension, (..., 1)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return sqrt_dim / norm.hypot_(sqrt_dim_eps)


def _scale(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    y = (x * inverse).mul_(weight)
    return y if y.dtype == x.dtype else y.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with an explicit backward pass that reads and writes fewer tensors than autograd.

    y = w u, where u = r x and r is the inverse RMS. With g = dL/dy: dL/dw = sum(g u) over all rows, and in each row
    dL/dx = r (g w - u mean(g w u)). This function has no second derivative.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sqrt_dim: Tensor, sqrt_dim_eps: Tensor) -> Tensor:
        inverse = _inverse_rms(x, sqrt_dim, sqrt_dim_eps)  # (..., 1)
        ctx.save_for_backward(x, inverse, weight)
        return _scale(x, inverse, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, inverse, weight = ctx.saved_tensors
        unit = x * inverse  # (..., D)
        y, rows = g * unit, tuple(range(x.ndim - 1))  # y: (..., D), reused below
        grad_weight = y.sum(rows) if rows else y.clone()  # (D,)
        along = y.mul_(weight).mean(-1, keepdim=True)  # (..., 1)
        torch.mul(g, weight.to(y.dtype), out=y)
        return y.addcmul_(unit, along, value=-1).mul_(inverse), grad_weight, None, None


# --- dropout


def _dropout_mask(shape: torch.Size, p: float, dtype: torch.dtype) -> Tensor:
    """Return a tensor of ones, in which each element is zero with probability p, a multiple of 1/65536.

    The generator of torch draws 64 bits at a time. Each draw decides about four elements, so this function takes a
    fraction of the time of `bernoulli_`.
    """
    n = math.prod(shape)
    draws = torch.empty(-(-n // 4), dtype=torch.int64).random_(-(2**63), None)
    numbers = draws.view(torch.int16)[:n].view(shape)  # from -2**15 to 2**15 - 1
    threshold = min(round(p * 2**16), 2**16 - 1) - 2**15
    return torch.ge(numbers, threshold, out=torch.empty(shape, dtype=dtype))


class Dropout(nn.Dropout):
    """In training, zero elements with probability p and divide the others by 1 - p (Srivastava et al., 2014)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not _is_eager_on_cpu(x):
            return super().forward(x)
        return x * _dropout_mask(x.shape, self.p, x.dtype) / (1 - self.p)  # (..., D)


# --- attention


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    """Return softmax(q k^T / sqrt(K) + mask) v, (B, H, T, K), with dropout of the softmax; causal without a mask.

    q: (B, H, T, K); k and v: (B, n_kv_heads, S, K); mask: (B, 1, T, S).
    """
    group = q.shape[1] // k.shape[1]  # query heads that share keys and values
    if not dropout or mask is not None or not _is_eager_on_cpu(q):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, enable_gqa=group > 1
        )
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # (B, H, T, K)
    with torch.autocast("cpu", enabled=False):  # v has the precision of the matmuls already
        y = _DropoutAttention.apply(*(x.to(v.dtype).flatten(0, 1) for x in (q, k, v)), dropout)  # type: ignore[no-untyped-call]
    return y.unflatten(0, q.shape[:2])


class _DropoutAttention(torch.autograd.Function):
    """Causal attention with dropout of its weights; q, k, v: (N, T, K).

    With W the softmax of a row of scores, M zeros and 1 / (1 - p), y = (W * M) v and g = dL/dy, the gradient of the
    scores is W * M * (g v^T) - W * (g y), because the sum of W * M * (g v^T) is g y (Dao et al., 2022).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        q = q * q.shape[-1] ** -0.5
        y = torch.empty_like(v)  # (N, T, K)
        saved = list[Tensor]()
        future = torch.full((CHUNK, CHUNK), -math.inf, dtype=q.dtype).triu(1)  # (CHUNK, CHUNK)
        for begin in range(0, q.shape[1], CHUNK):
            end = min(begin + CHUNK, q.shape[1])
            scores = q[:, begin:end] @ k[:, :end].mT  # (N, CHUNK, end)
            scores[..., begin:] += future[: end - begin, : end - begin]
            weights = scores.softmax(-1)  # (N, CHUNK, end)
            kept = weights * _dropout_mask(weights.shape, p, weights.dtype)
            y[:, begin:end] = kept @ v[:, :end]  # (N, CHUNK, K)
            saved += (weights, kept)
        y /= 1 - p
        ctx.save_for_backward(q, k, v, y, *saved)
        ctx.p = p
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, y, *saved = ctx.saved_tensors
        along = (g * y).sum(-1, keepdim=True)  # (N, T, 1)
        g = g / (1 - ctx.p)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)  # (N, T, K) each
        for begin, weights, kept in zip(range(0, q.shape[1], CHUNK), saved[::2], saved[1::2], strict=True):
            end = min(begin + CHUNK, q.shape[1])
            scores = g[:, begin:end] @ v[:, :end].mT  # (N, CHUNK, end)
            scores.mul_(kept).addcmul_(weights, along[:, begin:end], value=-1)
            grad_q[:, begin:end] = scores @ k[:, :end]  # (N, CHUNK, K)
            grad_k[:, :end] += scores.mT @ q[:, begin:end]  # (N, end, K)
            grad_v[:, :end] += kept.mT @ g[:, begin:end]
        return grad_q.mul_(q.shape[-1] ** -0.5), grad_k, grad_v, None
