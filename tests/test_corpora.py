"""What the experiments on public corpora say about their cost is what their settings come to."""

import re

import pytest
import torch
from conftest import ROOT

from lm.cli.compose import compose
from lm.cli.mistakes import CONFIGS
from lm.config import RunConfig
from lm.model.size import flops_per_token, n_params
from lm.model.transformer import Transformer
from lm.training.optim import step_flops

CORPORA = ("tinystories", "cs336", "wikitext103", "fineweb_edu")


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPORA)
def test_the_cost_of_an_experiment_is_computed_from_its_settings(name: str) -> None:
    run = compose("train", [f"experiment={name}"], RunConfig)
    vocab_size = run.tokenizer.vocab_size or 0
    with torch.device("meta"):
        net = Transformer(run.model, run.head, vocab_size=vocab_size, seq_len=run.data.seq_len, seed=0)
    tokens = run.tokens_per_step * run.steps
    step = step_flops(net, run.optim, run.head) // run.tokens_per_step
    flops = f"{tokens * (flops_per_token(net) + step):.1e}".replace("e+", "e")
    said = f"{n_params(net) / 1e6:.1f} M parameters, {tokens / 1e6:.3g} M tokens"
    head = " ".join(re.findall(r"^# (.*)$", (CONFIGS / f"experiment/{name}.yaml").read_text(), re.MULTILINE))
    assert f"Computed, not measured: {said}" in head
    assert f"{flops} FLOPs" in head
    (row,) = re.findall(rf"^\| \[?`{name}`.*$", (ROOT / "docs/data.md").read_text(), re.MULTILINE)
    assert f"| {n_params(net) / 1e6:.1f} M | {tokens / 1e6:.3g} M | {flops} |" in row
