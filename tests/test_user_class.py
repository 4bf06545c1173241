"""Classes of the user's own for the linear layer, norm, FFN and positions, written the usual PyTorch way."""

import re
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, SEQ, TIED, VOCAB, tiny
from torch import nn

from lm.config import OptimConfig, UserError, foreign_classes
from lm.data.tokenizer import byte_tokenizer
from lm.formats.folder import load_model, save_model
from lm.lab.formats.huggingface import export
from lm.model import Transformer
from lm.model.size import flops_per_token
from lm.model.user_class import import_class
from lm.training.optim import build_optimizer
from tests.helpers.models import build, random_tokens

PARTS = """
import torch
import torch.nn.functional as F
from torch import nn
from lm.model.transformer import NoPosition


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return F.normalize(x, dim=-1, eps=self.eps) * self.weight


class FFN(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Parameter(0.1 * torch.randn(config.d_ff, config.d_model))
        self.experts = nn.Parameter(0.1 * torch.randn(2, config.d_model, config.d_ff))
        self.register_buffer("slope", torch.tensor(0.5))

    def forward(self, x):
        return F.leaky_relu(x @ self.up.T, self.slope) @ self.experts.sum(0).T


class Position(NoPosition):
    def __init__(self, config, seq_len):
        super().__init__(config, seq_len)
        self.register_buffer("angles", torch.arange(seq_len)[:, None] / torch.arange(1, config.d_model + 1))
        self.scale = nn.Parameter(torch.full((config.d_model,), 0.1))

    def embed(self, x, positions):
        return x + self.scale * self.angles[positions].sin()
"""
CONSTANTS = {"norm.weight": 1.0, "position.scale": 0.1, "blocks.0.ffn.slope": 0.5}
CHOICES = [
    *({"linear": "mine.LowRank"}, {"linear": "mine.FakeQuantised"}),  # of the pages
    {"ffn": "mine.ReGLU"},
    *({"norm": "parts_of_mine.Norm"}, {"ffn": "parts_of_mine.FFN"}, {"position": "parts_of_mine.Position"}),
]
KEYS = ("model.linear", "model.norm", "model.ffn", "model.position")
each = pytest.mark.parametrize
Build = Callable[..., Transformer]


@pytest.fixture(autouse=True)
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the user's own that can be imported and have not been: `mine` has the classes that the pages show."""
    (tmp_path / "parts_of_mine.py").write_text(PARTS)
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("model.md", "own-variant.md"))
    blocks = re.findall(r"^```python\n(.*?)^```", pages, re.DOTALL | re.M)
    (tmp_path / "mine.py").write_text("".join(block for block in blocks if "\nclass " in block))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("parts_of_mine", "mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture(params=CHOICES, ids=lambda choice: next(iter(choice.values())))
def net_of(request: pytest.FixtureRequest) -> Build:
    """Builds models with one such part."""
    config = tiny(qk_norm=True, **request.param)
    return lambda seed=0, v=VOCAB: Transformer(config, TIED, vocab_size=v, seq_len=SEQ, seed=seed)


def test_initial_values_are_those_of_the_constructor_by_the_seed_alone(net_of: Build) -> None:
    """The other parts are those of a model without the class, and no two layers share their draws."""
    torch.manual_seed(1)
    first = net_of().state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again, other = net_of().state_dict(), net_of(seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    plain = build("tied", qk_norm=True).state_dict()
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if name in CONSTANTS:
            assert (value == CONSTANTS[name]).all()
        elif value.unique().numel() > 1 and "angles" not in name:
            assert not torch.equal(value, other[name])
            assert "blocks.0" not in name or not torch.equal(value, first[name.replace("blocks.0", "blocks.1")])
        if name in plain and "_proj" not in name:
            assert torch.equal(value, plain[name])


def test_it_trains_and_is_loaded_with_trust_alone(net_of: Build, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    net = net_of(v=tokenizer.vocab_size)
    before = deepcopy(net.state_dict())
    options: dict[str, Any] = {"adam_lr": 0.01, "momentum": 0.9, "ns_steps": 4}
    optimizer = build_optimizer(net, OptimConfig(name="muon", warmup_steps=0, weight_decay=0.0, **options), TIED)
    tokens, targets = random_tokens(2, 4, SEQ)
    for _ in range(3):
        F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [name for name, value in net.named_parameters() if torch.equal(value, before[name])] == []
    save_model(net, tokenizer, tmp_path / "model")
    [(key, path)] = foreign_classes(net.config).items()
    module = path.partition(".")[0]
    del sys.modules[module]
    with pytest.raises(UserError, match=f"{key}={path}.*trust=true"):
        load_model(tmp_path)
    assert module not in sys.modules
    assert torch.equal(load_model(tmp_path, trust=True)[0](tokens), net.eval()(tokens))
    with pytest.raises(UserError, match=f"(?i){key}={path}: "):
        export(net, tokenizer, tmp_path / "out")


def test_classes_of_torch_need_no_module_of_ones_own() -> None:
    plain, net = (build("untied", linear=name, bias=True) for name in ("linear", "torch.nn.Linear"))
    assert type(net.blocks[0].ffn.up_proj) is nn.Linear
    assert torch.equal(net(random_tokens(1, SEQ)), plain(random_tokens(1, SEQ)))
    norm = build("tied", norm="torch.nn.RMSNorm", norm_eps=0.01, bias=True)
    assert (type(norm.norm), norm.norm.eps) == (nn.RMSNorm, 0.01)


# --- what is refused

ABSENT = ("nosuch.Linear", "torch.nn.Linaer", "torch.nn.functional.relu", "os.path")
OTHER_ARGUMENTS = ("torch.nn.ReLU", "torch.nn.Linear", "torch.nn.Linear", "torch.nn.ReLU")  # than KEYS need


def test_a_path_that_leads_to_no_such_class_is_refused_and_without_trust_nothing_is_imported() -> None:
    """The module `this` prints a text when it is imported, so nothing imports it."""
    for key, path in (*zip(KEYS, ABSENT, strict=True), *zip(KEYS, OTHER_ARGUMENTS, strict=True)):
        with pytest.raises(UserError, match=f"^{key}={path}: "):
            import_class(key, path)
        with pytest.raises(UserError, match=f"^{key}=this.Part .*trust=true"):
            import_class(key, "this.Part", trust=False)
    assert "this" not in sys.modules
    assert import_class("model.linear", "torch.nn.Linear", trust=False) is nn.Linear


def test_a_linear_class_without_a_matrix_is_named_with_the_setting_that_needs_one() -> None:
    for changes, setting in (({}, "model.residual_scale=1"), ({"previous_token_init": 1}, "previous_token_init=0")):
        with pytest.raises(UserError, match=rf"^model\.linear.*{setting}"):
            build(linear="torch.nn.Identity", d_ff=32, **changes)


WRONG = """
import torch
from torch import nn
from lm import Linear
from lm.model.transformer import NoPosition

class Base(nn.Module):
    def __init__(self, *_, **__): super().__init__()

class Double(Base):
    def forward(self, x): return x.double()
class Pair(Base):
    def forward(self, x): return x, x
class Raises(Base):
    def forward(self, x): raise KeyError("a\\nb")
class NotBuilt(Base):
    def __init__(self, *_, **__): raise KeyError("c")
class Wide(Linear):
    def __init__(self, n_in, n_out, bias=True): super().__init__(n_in, n_out + 1, bias)
class Embeds(NoPosition):
    def embed(self, x, positions): return x[None]
class Batched(NoPosition):
    def embed(self, x, positions): return x + positions.float().outer(x[0, 0])
"""
OUTPUTS = [
    ("norm", "Double", "returned torch.float64; expected torch.float32"),
    ("linear", "Wide", "returned (1, 2, 33); expected a tensor (1, 2, 32)"),
    ("ffn", "Pair", "returned tuple; expected a tensor (1, 2, 32)"),
    ("norm", "Raises", ": forward fails on (1, 2, 32) (KeyError: 'a\\nb')"),
    ("ffn", "NotBuilt", ": cannot be built (KeyError: 'c')"),
    ("position", "Embeds", ".embed returned (1, 1, 16, 32); expected a tensor (1, 16, 32)"),
    ("position", "Batched", ": embed fails on (1, 16, 32) (RuntimeError: "),
]


@each(("part", "name", "line"), OUTPUTS)
def test_a_class_with_a_wrong_output_is_named_before_training(part: str, name: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "parts_of_mine.py").write_text(WRONG)
    with pytest.raises(UserError) as caught:
        flops_per_token(build(**{part: f"parts_of_mine.{name}"}))
    assert line in str(caught.value)
    assert str(caught.value).startswith(f"model.{part}=parts_of_mine.{name}")
    if "returned" in line:
        with torch.device("meta"), pytest.raises(UserError, match=r"returned"):
            build(**{part: f"parts_of_mine.{name}"})


def test_a_module_of_the_current_folder_and_what_hides_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("elsewhere/shadow", "elsewhere/hidden", "here"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "here/shadow.py").write_text("from torch.nn import Linear\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere"), *(path for path in sys.path if path)])
    monkeypatch.chdir(tmp_path / "here")
    assert import_class("model.linear", "shadow.Linear") is nn.Linear
    for path, place in (("hidden.Linear", "elsewhere/hidden"), ("shadow.Absent", "here/shadow.py")):
        with pytest.raises(UserError, match=f"^model.linear={path}: .*{tmp_path}/{place}"):
            import_class("model.linear", path)
    with pytest.raises(UserError, match=f"No module named 'nosuch' in {tmp_path}/here or on the path"):
        import_class("model.linear", "nosuch.Linear")
