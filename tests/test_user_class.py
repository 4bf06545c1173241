"""Classes of the user's own for the linear layer, norm, FFN and positions, written the usual PyTorch way."""

import re
import sys
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import nn

from lm.config import DataConfig, OptimConfig, RunConfig, user_classes
from lm.data.tokenizer import byte_tokenizer
from lm.folder import load_model, save_model
from lm.lab.init_from.weights import copy_weights
from lm.lab.user_class import computes_tokens_alone, import_class, sources_of, try_classes
from lm.training.optim import build_optimizer
from tests.helpers import ROOT
from tests.helpers.decoding import by_definition, tokens
from tests.helpers.models import TOKENS, build, equal, train_step
from tests.helpers.refusals import refused
from tests.helpers.tiny import SEQ, TEXT, TIED, VOCAB, tiny

PARTS = """
import torch
import torch.nn.functional as F
from torch import nn
from lm.model import transformer


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return F.normalize(x, dim=-1, eps=self.eps) * self.weight


class Counted(Norm):
    def __init__(self, width, eps):
        super().__init__(width, eps)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n += self.training
        return super().forward(x)


class FFN(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Parameter(0.1 * torch.randn(config.d_ff, config.d_model))
        self.experts = nn.Parameter(0.1 * torch.randn(2, config.d_model, config.d_ff))
        self.register_buffer("slope", torch.tensor(0.5))

    def forward(self, x):
        return F.leaky_relu(x @ self.up.T, self.slope) @ self.experts.sum(0).T


class Position(transformer.Position):
    def __init__(self, config, seq_len):
        super().__init__(config, seq_len)
        self.register_buffer("angles", torch.arange(seq_len)[:, None] / torch.arange(1, config.d_model + 1))
        self.scale = nn.Parameter(torch.full((config.d_model,), 0.1))

    def embed(self, x, positions):
        return x + self.scale * self.angles[positions].sin()


class Neighbour(nn.Module):
    before, after = 1, 0  # the token before

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(2 * config.d_model, config.d_ff)
        self.down = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x):
        length = x.shape[1]
        neighbour = F.pad(x, (0, 0, self.before, self.after))[:, self.after : self.after + length]
        return self.down(F.relu(self.up(torch.cat([x, neighbour], -1))))


class Next(Neighbour):
    before, after = 0, 1


class Gated(Next):
    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gate * super().forward(x)


class Shared(nn.Module):  # one weight under two names
    def __init__(self, config):
        super().__init__()
        self.up, self.gate = (nn.Linear(config.d_model, config.d_ff, bias=False) for _ in range(2))
        self.gate.weight = self.up.weight
        self.down = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x):
        return self.down(F.relu(self.gate(x)) * self.up(x))


class Table(transformer.Position):
    def __init__(self, config, seq_len):
        super().__init__(config, seq_len)
        self.table = nn.Parameter(torch.randn(1, seq_len, config.d_model))

    def embed(self, x, positions):
        return x + self.table[0][positions]


class Noisy(FFN):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("slope", torch.rand(()), persistent=False)


class Counting(FFN):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("slope", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.slope += 0.5 * self.training
        return super().forward(x)
"""
CONSTANTS = {"norm.weight": 1.0, "position.scale": 0.1, "blocks.0.ffn.slope": 0.5}
CHOICES = [
    *({"linear": "mine.LowRank"}, {"linear": "mine.FakeQuantised"}),  # of the pages
    *({"ffn": "mine.ReGLU"}, {"ffn": "parts_of_mine.Shared"}),
    *({"norm": "parts_of_mine.Norm"}, {"ffn": "parts_of_mine.FFN"}, {"position": "parts_of_mine.Position"}),
]


@pytest.fixture(autouse=True)
def parts(tmp_path, monkeypatch):
    """Modules of the user's own that can be imported and have not been: `mine` has the classes that the pages show."""
    (tmp_path / "parts_of_mine.py").write_text(PARTS)
    pages = "".join((ROOT / name).read_text() for name in ("docs/classes.md", "docs/own-variant.md", "README.md"))
    blocks = re.findall(r"^```python\n(.*?)^```", pages, re.DOTALL | re.M)
    (tmp_path / "mine.py").write_text("".join(block for block in blocks if "\nclass " in block))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("parts_of_mine", "mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture(params=CHOICES, ids=lambda choice: next(iter(choice.values())))
def net_of(request):
    """Builds models with one such part."""
    return partial(build, "tied", qk_norm=True, **request.param)


def tried(model, **changes):
    """Try the classes of a model as a run does before it begins."""
    try_classes(RunConfig(model=model, data=DataConfig(seq_len=SEQ), **changes), VOCAB)


def test_initial_values_are_those_of_the_constructor_by_the_seed_alone(net_of):
    """The other parts are those of a model without the class, and no two layers share their draws."""
    first = net_of().state_dict()
    before = torch.get_rng_state()
    again, other = net_of().state_dict(), net_of(seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(first, again)
    plain = build("tied", qk_norm=True).state_dict()
    for name, value in first.items():
        if name in CONSTANTS:
            assert (value == CONSTANTS[name]).all()
        elif value.unique().numel() > 1 and "angles" not in name:
            assert not torch.equal(value, other[name])
            assert "blocks.0" not in name or not torch.equal(value, first[name.replace("blocks.0", "blocks.1")])
        if name in plain and "_proj" not in name:
            assert torch.equal(value, plain[name])


def test_a_run_that_continues_begins_with_its_parameters_and_buffers(net_of):
    """Buffers too, which a class may have changed during training."""
    old, new = net_of(), net_of(seed=1)
    for tensor in (*old.parameters(), *old.buffers()):
        tensor.data.add_(0.1)
    copy_weights(new, old)
    assert equal(new.state_dict(), old.state_dict())


def test_a_buffer_that_no_file_holds_is_made_anew(tmp_path):
    """As the tables of many positions, it follows from the settings."""
    created = 'self.register_buffer("slope", torch.tensor(0.5), persistent=False)'
    (tmp_path / "parts_of_mine.py").write_text(
        PARTS.replace('self.register_buffer("slope", torch.tensor(0.5))', created)
    )
    tokenizer = byte_tokenizer()
    net = build("tied", tokenizer.vocab_size, ffn="parts_of_mine.FFN").eval()
    save_model(net, tokenizer, tmp_path / "model")
    loaded, _ = load_model(tmp_path, classes=["parts_of_mine.FFN"])
    assert torch.equal(loaded(TOKENS), net(TOKENS))


def test_a_class_that_looks_at_earlier_tokens_is_decoded_as_it_computes():
    """It is allowed. A cache of keys and values does not hold what such a class needs."""
    net = build("tied", ffn="parts_of_mine.Neighbour").eval()
    for parameter in net.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    prompts, n = [[3, 1, 4, 1, 5], [9, 2]], SEQ - 5
    assert tokens(net, prompts, n) == [by_definition(net, prompt, n) for prompt in prompts]
    tried(net.config)
    assert not computes_tokens_alone(net)
    assert computes_tokens_alone(build("tied"))


def test_it_trains_and_is_loaded_if_its_class_is_given(net_of, tmp_path):
    """As it computes each token alone and is saved as it is trained."""
    tokenizer = byte_tokenizer()
    net = net_of(tokenizer.vocab_size)
    tried(net.config)
    before = deepcopy(net.state_dict())
    options = {"name": "muon", "adam_lr": 0.01, "momentum": 0.9, "ns_steps": 4}
    optimizer = build_optimizer(net, OptimConfig(warmup_steps=0, weight_decay=0.0, **options), TIED)
    for _ in range(2):
        train_step(net, optimizer)
    assert [name for name, value in net.named_parameters() if torch.equal(value, before[name])] == []
    save_model(net, tokenizer, tmp_path / "model")
    [(key, path)] = user_classes(net.config).items()
    module = path.split(".")[0]
    del sys.modules[module]
    with refused(rf"{key}={path}: .*classes=\[{path}\]"):
        load_model(tmp_path)
    assert module not in sys.modules
    assert torch.equal(load_model(tmp_path, classes=[path])[0](TOKENS), net.eval()(TOKENS))


# --- what is refused


def test_a_path_that_leads_to_no_class_is_refused_by_its_setting():
    for path in ("nosuch.Linear", "torch.nn.Linaer", "torch.nn.functional.relu", "os.path"):
        with refused(f"^model.norm={path}: "):
            import_class("model.norm", path)
    with refused(r"^model\.ffn=torch\.nn\.Linear: TypeError: .*out_features"):
        build(ffn="torch.nn.Linear")
    with refused(r"^model\.linear=torch\.nn\.Bilinear: TypeError: "):
        tried(tiny(linear="torch.nn.Bilinear"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *(("Next", "depend on later tokens"), ("Gated", "depend on later tokens")),
        *(("Noisy", "is random"), ("Counting", "training changes")),
    ],
)
def test_a_class_whose_score_would_be_wrong_is_refused(name, reason):
    before = torch.get_rng_state()
    with refused(rf"^model\.ffn=parts_of_mine\.{name}: .*{reason}"):
        tried(tiny(ffn=f"parts_of_mine.{name}"))
    assert torch.equal(torch.get_rng_state(), before)


def test_buffers_that_training_changes_are_refused_where_a_forward_pass_is_repeated():
    for norm, is_refused in (("parts_of_mine.Norm", False), ("parts_of_mine.Counted", True)):
        tried(tiny(norm=norm))
        with refused("activation_checkpointing=true: ") if is_refused else nullcontext():
            tried(tiny(norm=norm), activation_checkpointing=True)


def test_a_table_of_positions_whose_layout_is_not_known_is_not_cut():
    """That of model.position=learned is: tests/test_head.py."""
    net = partial(build, "tied", VOCAB, position="parts_of_mine.Table")
    for new in (SEQ // 2, 2 * SEQ):
        with refused(f"^data.seq_len={new}: .* has {SEQ} learned positions; choose that$"):
            copy_weights(net(new), net())


def test_a_linear_class_without_a_matrix_is_named_with_the_setting_that_needs_one():
    for changes, setting in (({}, "model.residual_scale=1"), ({"previous_token_init": 1}, "previous_token_init=0")):
        with refused(rf"^model\.linear.*{setting}"):
            build(linear="torch.nn.Identity", d_ff=32, **changes)


def test_a_module_of_the_current_folder_and_what_hides_it(tmp_path, monkeypatch):
    for folder in ("elsewhere/shadow", "here"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "here/shadow.py").write_text("from torch.nn import Linear\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere"), *(path for path in sys.path if path)])
    monkeypatch.chdir(tmp_path / "here")
    assert import_class("model.linear", "shadow.Linear") is nn.Linear
    (tmp_path / "here/package_of_mine").mkdir()
    for hiding, hidden in (("hidden_of_mine", "hidden_of_mine"), ("package_of_mine", "package_of_mine/__init__")):
        (tmp_path / f"elsewhere/{hiding}.py").touch()
        (tmp_path / f"here/{hidden}.py").write_text("from torch.nn import Linear\n")
        with refused(rf"^model\.linear={hiding}\.Linear: .*elsewhere/{hiding}.py hides {hidden}.py"):
            import_class("model.linear", f"{hiding}.Linear")


@pytest.mark.parametrize("names", [{}, {"__file__": "<stdin>"}])
def test_a_class_without_a_file_is_refused_because_a_change_would_not_be_seen(names, monkeypatch):
    notebook = ModuleType("notebook_of_mine")
    vars(notebook).update(names, Own=nn.Linear)
    monkeypatch.setitem(sys.modules, "notebook_of_mine", notebook)
    with refused(r"^model\.ffn=notebook_of_mine\.Own: .*a \.py file"):
        sources_of({"model.ffn": "notebook_of_mine.Own"})


def test_a_fault_of_a_class_names_the_arm_that_has_it(tmp_path, monkeypatch, command):
    head = (
        "from torch import nn\n\nclass FFN(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n"
    )
    (tmp_path / "faulty.py").write_text(f"{head}\n    def forward(self, x):\n        1 / 0\n")
    (tmp_path / "t.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["model.ffn=swiglu,faulty.FFN", "t.txt", "experiment=none", "tokenizer=char", "plan_only=true"]
    code, _, said = command("ablate", *words)
    line = "error: ablation.arms.ffn-faulty.FFN: model.ffn=faulty.FFN: ZeroDivisionError: division by zero"
    assert (code, said.splitlines()[-1]) == (2, line)
