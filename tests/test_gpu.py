"""On a GPU: training in bf16 and its resume, equal logits and continuations, and the compiled model. `pytest -m gpu`"""

import math
from dataclasses import replace

import pytest
import torch

from lm import load_model
from lm.config import CheckpointConfig, OptimConfig
from lm.data.batches import TrainingStream
from lm.scoring import evaluate
from lm.training.train import train
from tests.helpers.decoding import tokens
from tests.helpers.models import MODELS, build, name_of, random_tokens
from tests.helpers.runs import MUON, change, column, data_of, losses, result, short_run, stop
from tests.helpers.tiny import HEADS, SEQ

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),  # drivers and compilers have warnings of their own
]


def run_on_device(text, run_dir, **changes):
    """Twenty logged steps in full precision with checkpoints every five."""
    settings = {"accelerator": DEVICE, "checkpoint": CheckpointConfig(every=5, keep=3), **changes}
    return short_run(text, run_dir, **settings)


# --- training


@pytest.mark.parametrize(("head", "optim"), [("tied", OptimConfig(warmup_steps=5)), ("untied_midtraining", MUON)])
def test_training_in_bf16_ends_finite_and_resumes(head, optim, text_file, tmp_path):
    """Operations of a GPU may add in another order each time, so the resumed run is near the undisturbed one."""
    settings = {"head": HEADS[head], "optim": optim, "precision": "bf16-mixed"}
    whole = run_on_device(text_file, tmp_path / "whole", **settings)
    _, scores = train(whole)
    assert math.isfinite(scores["val_loss"])
    assert all(map(math.isfinite, column(tmp_path / "whole", "train/grad_norm")))
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    assert scores["device"] == torch.cuda.get_device_name()
    assert scores["precision"] == "bf16-mixed"

    run = change(whole, run_dir=str(tmp_path / "run"))
    stop(run, 12)
    _, resumed = train(run)
    assert resumed["resumed_from"] == [12]
    assert len(losses(tmp_path / "run")) == 20
    assert resumed["val_loss"] == pytest.approx(scores["val_loss"], abs=2e-2)
    assert result(tmp_path / "run") == resumed


@pytest.mark.parametrize("changes", [{"accelerator": "cpu"}, {"compile": True}])
def test_a_run_on_a_gpu_has_nearly_the_losses_of_a_cpu_and_of_compiled_code(changes, text_file, tmp_path, request):
    """In full precision, from the same weights and batches."""
    request.addfinalizer(torch.compiler.reset)
    _, scores = train(run_on_device(text_file, tmp_path / "run"))
    _, others = train(run_on_device(text_file, tmp_path / "other", **changes))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "other"), abs=2e-3)
    assert scores["val_loss"] == pytest.approx(others["val_loss"], abs=2e-3)


@torch.no_grad()
@pytest.mark.parametrize("model", MODELS[:6], ids=name_of)
def test_logits_agree_with_those_of_the_cpu(model):
    """And the same model in bf16 is near."""
    net, tokens = build(**model).eval(), random_tokens(4, SEQ)
    expected = net(tokens)
    net.to(DEVICE)
    logits = net(tokens.to(DEVICE))
    assert logits.device.type == DEVICE
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-3, atol=1e-4)
    with torch.autocast(DEVICE, torch.bfloat16):
        rough = net(tokens.to(DEVICE)).float().cpu()
    assert (rough - expected).norm() < 0.05 * expected.norm()


def test_greedy_decoding_and_scores_agree_with_those_of_the_cpu(text_file, tmp_path):
    """Of a model that is sure of its tokens, so that no rounding decides; alone and in a batch of unequal lengths."""
    optim = OptimConfig(lr=1e-2, weight_decay=0.0, decay="constant")
    run = run_on_device(text_file, tmp_path / "run", optim=optim, max_steps=150)
    run = replace(run, data=replace(run.data, batch_size=2, overfit_batches=1))
    train(run)
    net, _ = load_model(tmp_path / "run")
    data = data_of(run)
    batch, _ = TrainingStream(data.train, seq_len=32, batch_size=2, seed=0).batch(0)
    prompts = [batch[0, :8].tolist(), batch[1, :11].tolist()]
    score = evaluate(net, data.val, 32).loss
    on_cpu = tokens(net, prompts, 20)
    net.to(DEVICE)
    assert tokens(net, prompts, 20) == on_cpu
    assert tokens(net, prompts[:1], 24) == [batch[0, 8:].tolist()]
    assert evaluate(net, data.val, 32).loss == pytest.approx(score, rel=1e-3)
