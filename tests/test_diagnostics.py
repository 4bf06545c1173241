"""diagnostics.csv is correct and leaves the run equal bit for bit. Its rows after a kill: tests/test_resume.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lm import load_model
from lm.config import DiagnosticsConfig, OptimConfig
from lm.lab.measures.details import BANDS, frequency_bands, token_counts
from lm.lab.measures.diagnostics import COLUMNS, EmbeddingGradient
from lm.training.train import train
from tests.helpers.models import TARGETS, TOKENS, build
from tests.helpers.runs import column, compiles, data_of, outcome, rows, short_run, small_run
from tests.helpers.tiny import HEADS, TIED, UNTIED

PROJECTED = HEADS["tied_projected"]
LOSSES = [f"loss/band{i}" for i in range(1, BANDS + 1)]


def measures(folder, name):
    return column(folder, name, "diagnostics")


# --- the two parts of the gradient


def backward(net, parts=1):
    """The gradient of one step in `parts` micro-batches, as Lightning computes it."""
    for tokens, targets in zip(TOKENS.chunk(parts), TARGETS.chunk(parts), strict=True):
        (F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()) / parts).backward()


def measured(net, parts=1):
    steps = [False]
    gradient = EmbeddingGradient(net, lambda: steps[-1])
    backward(net)  # of a step that is not measured
    net.zero_grad()
    steps.append(True)
    backward(net, parts)
    with torch.no_grad():
        net(TOKENS)  # a validation is not measured either
    return gradient.gradients()


def untied_twin(net, output):
    """The gradients of the input and the output embeddings, from an untied model that is equal otherwise."""
    twin = build(replace(UNTIED, embedding_std=net.embed.std, embedding_multiplier=net.embed.multiplier))
    twin.head.proj.load_state_dict({"weight": output})
    backward(twin)
    return twin.embed.weight.grad, twin.head.proj.weight.grad


def near(tensor, other):
    is_zero = other.norm().item() < 1e-3
    return not is_zero and torch.allclose(tensor, other, rtol=1e-4, atol=1e-6 * other.abs().max().item())


@pytest.mark.parametrize(
    ("head", "progress", "parts"),
    [
        (TIED, 0.0, 2),
        (replace(TIED, embedding_multiplier=2.5), 0.0, 1),
        (replace(UNTIED, embedding_multiplier=None), 0.0, 2),
        (HEADS["untied_midtraining"], 0.9, 1),
        (PROJECTED, 0.0, 1),
    ],
)
def test_both_gradients_equal_those_of_an_untied_twin(head, progress, parts):
    """With a projection that through the logits is of the embedding, from which they are computed."""
    net = build(head)
    net.head.on_train_step(progress, net.embed.weight, {})
    if head is PROJECTED:
        net.head.proj.weight.data.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.2)
    output = net.head.matrix(net.embed.weight)
    embedding_grad, head_grad = measured(net, parts)
    twin_embedding_grad, twin_head_grad = untied_twin(net, output.detach())
    if head is PROJECTED:
        twin_head_grad = twin_head_grad @ net.head.proj.weight.T  # output = embedding @ projection
    assert near(embedding_grad, twin_embedding_grad)
    assert near(head_grad, twin_head_grad)
    is_one = head is PROJECTED or output is net.embed.weight
    assert near(net.embed.weight.grad, embedding_grad + head_grad if is_one else embedding_grad)
    assert not near(embedding_grad, head_grad), "so that they cannot be confused"


# --- the rows of a run


def test_diagnostics_leave_the_run_equal_bit_for_bit(text_file, tmp_path):
    """With dropout and accumulation, and a head that is untied on the way."""

    def compared(name, **changes):
        run = small_run(text_file, tmp_path / name, max_steps=20, head=HEADS["untied_midtraining"], **changes)
        train(run)
        content = outcome(run)
        del content["result"]["config_hash"]
        content.pop("diagnostics.csv", None)
        return content

    off, on = compared("off"), compared("on", diagnostics=DiagnosticsConfig(every=3))
    assert on == off
    assert not (tmp_path / "off/diagnostics.csv").exists()
    assert measures(tmp_path / "on", "step") == [3, 6, 9, 12, 15, 18, 20]
    assert tuple(rows(tmp_path / "on", "diagnostics")[0]) == COLUMNS


def test_losses_and_norms_by_band_match_the_saved_model(text_file, tmp_path):
    """Which is an average. Only the last row has losses, for they cost a pass; one without targets is empty."""
    changes = {"diagnostics": DiagnosticsConfig(every=8), "optim": OptimConfig(warmup_steps=5, ema=0.9)}
    run = short_run(text_file, tmp_path / "run", head=HEADS["tied_scaled"], **changes)
    folder, _ = train(run)
    data = data_of(run)
    bands = frequency_bands(token_counts(data.train, data.tokenizer.vocab_size))
    *before, last = rows(folder, "diagnostics")
    assert not any(row[name] for row in before for name in LOSSES)
    assert all(row[name] for row in [*before, last] for name in COLUMNS if name not in LOSSES)
    counts = np.bincount(bands[data.val[1:]], minlength=BANDS)
    assert [last[name] != "" for name in LOSSES] == [bool(count) for count in counts]
    net, _ = load_model(folder)
    matrices = {"embedding_norm": net.embed.matrix(), "head_norm": net.head.matrix(net.embed.weight)}
    for name, matrix in matrices.items():
        expected = [matrix[bands == i].norm(dim=1).mean().item() for i in range(BANDS)]
        assert [float(last[f"{name}/band{i + 1}"]) for i in range(BANDS)] == pytest.approx(expected, rel=1e-5)
    assert last["embedding_norm/band1"] != last["head_norm/band1"]


@pytest.mark.nightly
@compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which torch hides from users
def test_a_compiled_model_is_measured_too(text_file, tmp_path, request):
    request.addfinalizer(torch.compiler.reset)  # compiled code of a model with hooks must not reach other tests
    changes = {"diagnostics": DiagnosticsConfig(every=3), "head": HEADS["tied_scaled"], "max_steps": 7}
    runs = (short_run(text_file, tmp_path / str(on), compile=on, **changes) for on in (False, True))
    (plain, _), (compiled, _) = map(train, runs)
    for name in COLUMNS:
        assert measures(compiled, name) == pytest.approx(measures(plain, name), rel=1e-2, abs=1e-3)
