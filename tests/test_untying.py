"""Variants of the head in training: paired runs see the same, and a head is untied without a jump."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HEADS, TIED
from safetensors.torch import load_file

from lm import Transformer, load_model
from lm.config import EvaluateConfig, HeadConfig
from lm.inference.evaluate import evaluate_run
from lm.training.module import LMModule
from lm.training.signals import Interrupted
from lm.training.train import train
from tests.helpers.runs import losses, rows, small_run

MIDTRAINING = HEADS["untied_midtraining"]  # unties before step 11 of 20
TOKENS = torch.arange(64).view(2, 32)


def run_with_dropout(text: Path, run_dir: Path, head: HeadConfig, **changes: Any) -> Path:
    """Twenty logged steps with dropout and accumulation."""
    settings = {"max_steps": 20, "log_every_n_steps": 1, **changes}
    return train(small_run(text, run_dir, head=head, **settings))[0]


@pytest.fixture(scope="module")
def tied(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_with_dropout(text_file, tmp_path_factory.mktemp("tied") / "run", TIED)


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model/model.safetensors")


@pytest.mark.slow
def test_every_variant_is_trained_on_the_same_batches_with_the_same_dropout(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: dict[str, list[Any]] = {}
    training_step = LMModule.training_step

    def recorded(module: LMModule, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = training_step(module, batch, batch_idx)
        batches.setdefault(module.run.head.name, []).append((batch[0].tolist(), torch.initial_seed()))
        return loss

    monkeypatch.setattr(LMModule, "training_step", recorded)
    first = {
        name: losses(run_with_dropout(text_file, tmp_path / name, head, max_steps=3))[0] for name, head in HEADS.items()
    }
    assert len(batches["tied"]) == 6
    assert all(batches[name] == batches["tied"] for name in HEADS)
    as_tied = {name for name in HEADS if first[name] == first["tied"]}
    assert as_tied == {"tied", "tied_projected", "untied_from_embedding", "untied_midtraining"}, "bit for bit"


@pytest.mark.slow
def test_a_run_equals_the_tied_one_until_it_unties(tied: Path, text_file: Path, tmp_path: Path) -> None:
    """The first untied step has the same loss, but two gradients instead of one."""
    before, after = rows(tied), rows(run_with_dropout(text_file, tmp_path / "untied", MIDTRAINING))
    assert after[:10] == before[:10]
    assert after[10]["train/loss"] == before[10]["train/loss"]
    assert after[10]["train/grad_norm"] != before[10]["train/grad_norm"]
    assert all(row["train/loss"] != other["train/loss"] for row, other in zip(after[11:], before[11:], strict=True))
    ended = weights(tmp_path / "untied")
    assert not torch.equal(ended["head.proj.weight"], ended["embed.weight"])


@pytest.mark.slow
def test_untied_at_one_equals_tied_bit_for_bit(tied: Path, text_file: Path, tmp_path: Path) -> None:
    """And the saved model, which has two matrices, has the logits of the tied one."""
    end = run_with_dropout(text_file, tmp_path / "one", replace(MIDTRAINING, untie_at=1.0))
    assert rows(end) == rows(tied)
    (net, _), (tied_net, _) = load_model(end), load_model(tied)
    assert torch.equal(net(TOKENS), tied_net(TOKENS))
    assert torch.equal(net.head.proj.weight, tied_net.embed.weight)
    assert evaluate_run(EvaluateConfig(run_dir=str(end), threads=1))["loss"] == float(rows(tied)[-1]["val/loss"])


def test_a_run_stopped_before_untying_saves_the_model_that_was_trained(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It equals that of a tied run stopped after the same step."""
    training_step = LMModule.training_step

    def signalled(module: LMModule, batch: Any, batch_idx: int) -> torch.Tensor:
        if module.trainer.global_step == 4 and batch_idx % 2 == 0:  # a second signal would end the process
            os.kill(os.getpid(), signal.SIGTERM)
        return training_step(module, batch, batch_idx)

    monkeypatch.setattr(LMModule, "training_step", signalled)
    for name, head in (("tied", TIED), ("untied", MIDTRAINING)):
        with pytest.raises(Interrupted, match="after step 5"):
            run_with_dropout(text_file, tmp_path / name, head)
    (untied, _), (tied, _) = load_model(tmp_path / "untied"), load_model(tmp_path / "tied")
    assert torch.equal(untied(TOKENS), tied(TOKENS))
    fresh = Transformer(untied.config, MIDTRAINING, vocab_size=257, seq_len=32)
    assert not torch.equal(untied.embed.weight, fresh.embed.weight)
