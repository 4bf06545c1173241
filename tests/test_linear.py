"""Linear: what it computes, its initialisation, and that another class can replace it."""

import importlib
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import HEADS, ROOT, SEQ, TIED, TINY_RUN, UNTIED, VOCAB, tiny
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lm.config import BadInput, HeadConfig, OptimConfig
from lm.data.vocabulary import byte_tokenizer
from lm.exchange.huggingface import export
from lm.model.linear import HAS_ONEDNN, ONEDNN_MIN_NUMEL, Linear, linear
from lm.model.projection import linear_class
from lm.model.transformer import Transformer
from lm.training.optim import build_optimizer


class LowRank(nn.Module):
    """x A^T B^T: a linear map of rank two at most."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(2, in_features))
        self.b = nn.Parameter(torch.empty(out_features, 2))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.a, std=0.1)
        nn.init.normal_(self.b, std=0.1)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.a), self.b, self.bias)


def twins(*shape: int, **options) -> tuple[Linear, nn.Linear]:
    """Our Linear and nn.Linear from the same random state."""
    torch.manual_seed(0)
    ours = Linear(*shape, **options)
    torch.manual_seed(0)
    return ours, nn.Linear(*shape, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (7, 5), (96, 256), (1000, 3)])
def test_equals_torch_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype, bias: bool) -> None:
    ours, torchs = twins(*shape, bias=bias, dtype=dtype)
    x = torch.randn(4, shape[0], dtype=dtype)
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    assert all(torch.equal(ours.state_dict()[name], torchs.state_dict()[name]) for name in ours.state_dict())
    assert torch.equal(ours(x), torchs(x))


class Called(TorchDispatchMode):
    """The names of torch's operations in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")
@pytest.mark.parametrize("shape", [(3, 1, 1024), (1, 1024), (1024,), (2, 5, 1024)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_large_matrix_goes_through_onednn_outside_of_training(
    shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.model.linear.ONEDNN_MIN_ROWS", 1)
    torch.manual_seed(0)
    weight, x = torch.randn(ONEDNN_MIN_NUMEL // 1024, 1024), torch.randn(shape)
    x = x.transpose(0, -2) if len(shape) > 2 else x
    b = torch.randn(len(weight)) if bias else None
    with torch.no_grad(), Called() as fast:
        y = linear(x, weight, b)
    with Called() as slow:
        linear(x, weight, b)
    torch.testing.assert_close(y, F.linear(x, weight, b), rtol=1e-5, atol=1e-3)
    assert fast.names == ["mkldnn::_linear_pointwise"]
    assert not any("mkldnn" in name for name in slow.names)
    with torch.no_grad(), Called() as small:
        linear(x, weight[:-1])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Called() as mixed:
        linear(x, weight)
    with torch.no_grad(), Called() as double:
        linear(x.double(), weight.double())
    assert not any("mkldnn::_linear" in name for one in (small, mixed, double) for name in one.names)


@pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")
@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_onednn_is_used_from_a_number_of_rows_on(least: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.model.linear.ONEDNN_MIN_ROWS", least)
    x, weight = torch.randn(1, rows, 1024), torch.randn(ONEDNN_MIN_NUMEL // 1024, 1024)
    with torch.no_grad(), Called() as called:
        linear(x, weight)
    assert (called.names == ["mkldnn::_linear_pointwise"]) is (rows >= least)


def test_known_numbers_of_seed_zero() -> None:
    ours, _ = twins(2, 3)
    y = ours(torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    close = {"atol": 5.1e-5, "rtol": 0}
    assert torch.allclose(
        ours.weight, torch.tensor([[-0.0053, 0.3793], [-0.5820, -0.5204], [-0.2723, 0.1896]]), **close
    )
    assert torch.allclose(ours.bias, torch.tensor([-0.0140, 0.5607, -0.0628]), **close)
    assert torch.allclose(y, torch.tensor([[0.3653, 0.0403, 0.1269], [1.1134, -2.1645, -0.0386]]), **close)


def test_a_matrix_vector_product_by_hand() -> None:
    weight = torch.tensor([[1.0, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]])
    assert linear(torch.tensor([1.0, 2, 3, 4]), weight).tolist() == [30, 40, 50]


def test_the_weight_is_out_by_in_and_all_forms_of_the_product_agree() -> None:
    layer, x = Linear(4, 3), torch.randn(5, 4)
    assert layer.weight.shape == (3, 4)
    assert layer.bias.shape == (3,)
    for y in (
        F.linear(x, layer.weight, layer.bias),
        torch.matmul(x, layer.weight.T) + layer.bias,
        x @ layer.weight.T + layer.bias,
    ):
        assert torch.allclose(layer(x), y, atol=1e-5)


@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (2, 3, 5), (0,), (2, 0)])
def test_it_acts_on_the_last_dimension_of_any_shape(leading: tuple[int, ...]) -> None:
    layer, x = Linear(4, 3), torch.randn(*leading, 4)
    assert layer(x).shape == (*leading, 3)
    assert torch.allclose(layer(x).reshape(-1, 3), layer(x.reshape(-1, 4)), atol=1e-5)


def test_initial_values_are_within_one_over_root_fan_in_unlike_he_initialisation() -> None:
    """Kaiming uniform with a = sqrt(5): variance 1/(3 fan_in), six times below He's 2/fan_in for ReLU."""
    torch.manual_seed(0)
    layer, bound = Linear(64, 4096), 1 / math.sqrt(64)
    for parameter in (layer.weight, layer.bias):
        assert 0.99 * bound < parameter.abs().max() <= bound
    assert layer.weight.var().item() == pytest.approx(1 / (3 * 64), rel=0.02)
    he = nn.init.kaiming_uniform_(torch.empty(4096, 64), nonlinearity="relu")
    assert he.var().item() == pytest.approx(6 * layer.weight.var().item(), rel=0.02)


@pytest.mark.parametrize("shape", [(5,), (2, 3), (4, 5)])
def test_a_wrong_last_dimension_names_both_sizes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"\b{shape[-1]}\b.*\b4\b"):
        Linear(4, 3)(torch.zeros(shape))


def test_hooks_fire_because_modules_are_called() -> None:
    """Every Linear is called as a module, in the order of the modules."""
    net = Transformer(tiny(), UNTIED, vocab_size=VOCAB, seq_len=SEQ)
    linears = [module for module in net.modules() if isinstance(module, Linear)]
    fired: list[nn.Module] = []
    for module in linears:
        module.register_forward_hook(lambda module, *_: fired.append(module))
    net(torch.zeros(1, SEQ, dtype=torch.long))
    assert len(linears) == 2 * 6 + 1
    assert fired == linears
    linears[0].forward(torch.zeros(1, 32))  # calling forward directly fires no hook
    assert fired == linears


def test_gradients_by_formula() -> None:
    """dL/dW = G^T X, dL/db = sum of G over the batch, dL/dX = G W."""
    layer, x, g = Linear(4, 3), torch.randn(5, 4, requires_grad=True), torch.randn(5, 3)
    layer(x).backward(g)
    assert torch.allclose(layer.weight.grad, g.T @ x, atol=1e-5)
    assert torch.allclose(layer.bias.grad, g.sum(0), atol=1e-5)
    assert torch.allclose(x.grad, g @ layer.weight, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"dtype": torch.float64}, {"device": "meta"}])
def test_options_and_repr_are_torchs(options: dict) -> None:
    ours, torchs = Linear(4, 3, **options), nn.Linear(4, 3, **options)
    assert repr(ours) == repr(torchs)
    assert (ours.bias is None) == (torchs.bias is None)
    assert ours.weight.dtype == torchs.weight.dtype
    assert ours.weight.device == torchs.weight.device


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_torch_nn_linear_gives_the_same_logits(head: HeadConfig, bias: bool) -> None:
    tokens = torch.arange(SEQ)[None]
    ours, torchs = (
        Transformer(tiny(linear=name, bias=bias), head, vocab_size=VOCAB, seq_len=SEQ)
        for name in ("linear", "torch.nn.Linear")
    )
    assert type(torchs.blocks[0].ffn.up_proj) is nn.Linear
    assert torch.equal(ours(tokens), torchs(tokens))


@pytest.mark.parametrize("residual_scale", [None, 0.0])
def test_a_custom_linear_class_trains(residual_scale: float | None) -> None:
    config = tiny(linear=f"{__name__}.LowRank", bias=True, residual_scale=residual_scale)
    net = Transformer(config, TIED, vocab_size=VOCAB, seq_len=SEQ)
    optimizer = build_optimizer(net, OptimConfig(weight_decay=0.0, warmup_steps=0), TIED)
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    tokens, targets = torch.randint(VOCAB, (2, 4, SEQ), generator=torch.Generator().manual_seed(0))
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    assert isinstance(net.blocks[1].attn.k_proj, LowRank)
    assert [name for name, parameter in net.named_parameters() if torch.equal(parameter, before[name])] == []


class WithoutBias(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()


NAMES = ["Linear", "linaer", "", "nosuch.Linear", "os.path", "torch.nn.functional.relu", f"{__name__}.WithoutBias"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_no_module_class_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"model.linear={name}"):
        linear_class(name)


def test_a_class_that_its_module_lacks_is_named() -> None:
    with pytest.raises(BadInput, match=r"torch\.nn\.Linaer: torch\.nn has no Linaer"):
        linear_class("torch.nn.Linaer")


def test_without_trust_nothing_is_imported() -> None:
    """The module `this` prints a text when it is imported, so nothing imports it."""
    with pytest.raises(BadInput, match="trust=true"):
        linear_class("this.Linear", trust=False)
    assert "this" not in sys.modules
    assert linear_class("torch.nn.Linear", trust=False) is nn.Linear
    assert linear_class("linear", trust=False) is Linear


# --- the classes of docs/model.md


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that the page shows."""
    page = (ROOT / "docs/model.md").read_text()
    (code,) = (
        block for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.M) if "FakeQuantised" in block
    )
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return importlib.import_module("mine")


@pytest.mark.parametrize("name", ["LowRank", "FakeQuantised"])
def test_the_classes_of_the_page_train_and_are_not_exported(name: str, mine: ModuleType, tmp_path: Path) -> None:
    config = tiny(linear=f"mine.{name}", d_model=64, bias=True)
    net = Transformer(config, TIED, vocab_size=257, seq_len=SEQ)
    optimizer, losses = build_optimizer(net, OptimConfig(lr=0.01), TIED), []
    tokens = torch.arange(SEQ)[None]
    for _ in range(20):
        losses.append(F.cross_entropy(net(tokens[:, :-1])[0], tokens[0, 1:]))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert losses[-1] < 0.5 * losses[0]
    q_proj = net.blocks[0].attn.q_proj
    with torch.no_grad():
        matrix = q_proj(torch.eye(64)) - q_proj(torch.zeros(64))  # (in, out)
    if name == "LowRank":
        assert torch.linalg.matrix_rank(matrix, rtol=1e-4) == 8
    else:
        values = [len(row.div(row.abs().amax() / 7).round(decimals=2).unique()) for row in matrix.T]
        assert max(values) <= 15 < len(q_proj.weight[0].unique())
    with pytest.raises(BadInput, match=rf"model\.linear=mine\.{name}: only models with model\.linear=linear"):
        export(net, byte_tokenizer(), tmp_path / "out")


@pytest.mark.slow
def test_a_module_in_the_current_folder_is_found(mine: ModuleType, corpus: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs/model.md").read_text()
    for line in re.findall(r"^python (-m lm train model\.linear=mine\..*)$", page, re.MULTILINE):
        words = [sys.executable, *line.split(), *TINY_RUN, f"data.path={corpus}", f"run_dir={line.split()[3]}"]
        found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert found.returncode == 0, found.stderr
