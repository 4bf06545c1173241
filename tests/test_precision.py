"""bf16 is chosen where it is supported natively, and it is nearly the same function as fp32."""

from collections.abc import Iterator
from functools import partial

import lm.training.muon as module
import pytest
import torch
import torch.nn.functional as F
from conftest import SEQ, TIED, VOCAB, tiny
from lm.training.muon import Muon
from lm.training.options import resolve
from lm.training.step import train_step
from torch import Tensor, nn

from lm.config import BadInput, RunConfig
from lm.model.transformer import Transformer
from lm.system.device import MAX_FAST_SEQ_LEN, fast_attention, has_native_bf16, is_mixed, set_threads
from lm.training.loss import plain


@pytest.fixture(autouse=True)
def uncached() -> Iterator[None]:
    has_native_bf16.cache_clear()
    yield
    has_native_bf16.cache_clear()


@pytest.mark.parametrize(
    ("known", "precision"),
    [
        ({"avx512_bf16": True, "cpu_name": "AMD EPYC"}, "bf16-mixed"),
        ({"avx512_bf16": True, "cpu_name": "Intel Xeon"}, "32-true"),
        ({"avx512_bf16": True, "amx_bf16": True, "cpu_name": "Intel Xeon"}, "bf16-mixed"),
        ({"amx_bf16": True, "avx512_bf16": False}, "bf16-mixed"),
        ({"avx512_f": True, "avx512_bf16": False}, "32-true"),
        ({}, "32-true"),
    ],
)
def test_a_cpu_trains_in_bf16_where_it_is_supported_natively(
    known: dict[str, bool | str], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    assert resolve(RunConfig(trainer={"accelerator": "cpu", "max_steps": 1}))["precision"] == precision
    assert (
        resolve(RunConfig(trainer={"accelerator": "cpu", "precision": None, "max_steps": 1}))["precision"] == precision
    )
    has_native_bf16.cache_clear()
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # an older torch
    assert resolve(RunConfig(trainer={"accelerator": "cpu", "max_steps": 1}))["precision"] == "32-true"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_given_precision_is_kept(precision: str) -> None:
    assert resolve(RunConfig(trainer={"precision": precision, "max_steps": 1}))["precision"] == precision
    assert is_mixed(precision) == (precision == "bf16-mixed")


@pytest.mark.parametrize("name", ["gpu", "cuda"])
def test_an_absent_gpu_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(BadInput, match=rf"^trainer\.accelerator={name}: torch finds no GPU here"):
        resolve(RunConfig(trainer={"accelerator": name, "max_steps": 1}))


@pytest.mark.parametrize(
    ("device", "mixed", "seq_len", "fast"),
    [
        ("cpu", True, MAX_FAST_SEQ_LEN, True),
        ("cpu", True, MAX_FAST_SEQ_LEN + 1, False),
        ("cpu", False, 8, False),
        ("cuda", True, 8, False),
    ],
)
def test_attention_uses_plain_matmuls_only_where_that_is_faster(
    device: str, mixed: bool, seq_len: int, fast: bool
) -> None:
    def settings() -> tuple[bool, bool]:
        cuda = torch.backends.cuda
        return cuda.flash_sdp_enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed()

    before = settings()
    with fast_attention(device, mixed, seq_len):
        assert settings() == ((False, True) if fast else before)
    assert settings() == before
    with pytest.raises(KeyError), fast_attention(device, mixed, seq_len):
        raise KeyError
    assert settings() == before


def test_attention_by_plain_matmuls_is_the_same_function() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, 16, 8) for _ in range(3)]

    def attend(dtype: torch.dtype, fast: bool) -> list[Tensor]:
        q, k, v = (one.clone().to(dtype).requires_grad_() for one in inputs)
        with fast_attention("cpu", fast, 16):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y.float().square().sum().backward()
        return [one.float() for one in (y.detach(), q.grad, k.grad, v.grad) if one is not None]

    exact, rough = attend(torch.float32, False), attend(torch.bfloat16, True)
    assert len(exact) == len(rough) == 4
    for one, other in zip(exact, rough, strict=True):
        assert (one - other).norm() < 0.02 * one.norm()


def test_bf16_gradients_have_the_direction_of_fp32_gradients() -> None:
    """And they are not equal: the matmuls ran in bf16."""
    found = []
    for mixed in (False, True):
        torch.manual_seed(0)
        net = Transformer(tiny(), TIED, vocab_size=VOCAB, seq_len=SEQ)
        tokens = torch.randint(VOCAB, (4, SEQ))
        kept = Keep(net.parameters(), lr=0.0)
        train_step(partial(plain, net), kept, [(tokens, tokens.roll(-1, 1))], mixed)
        found.append(kept.gradient)
    assert F.cosine_similarity(*found, dim=0) > 0.999
    assert (found[0] - found[1]).norm() > 1e-4 * found[0].norm()


class Keep(torch.optim.SGD):
    gradient: Tensor

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.gradient = torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]])


def test_muon_updates_in_bf16_are_close_to_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    gradient, found = torch.randn(64, 32), []
    for native in (True, False):
        monkeypatch.setattr(module, "has_native_bf16", lambda device, native=native: native)
        matrix = nn.Parameter(torch.zeros(64, 32))
        matrix.grad = gradient.clone()
        Muon([{"params": [matrix], "momentum": 0.9, "ns_steps": 5, "weight_decay": 0.0}], lr=0.1).step()
        found.append(matrix.detach())
    rough, exact = found
    assert rough.dtype == exact.dtype == torch.float32
    assert 1e-4 * exact.norm() < (rough - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("said", ["abc", "0", "-2"])
def test_an_invalid_omp_num_threads_is_named(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    with pytest.raises(BadInput, match=f"OMP_NUM_THREADS={said}: expected a number"):
        set_threads(None)
    assert set_threads(torch.get_num_threads()) == torch.get_num_threads()  # the setting takes precedence
