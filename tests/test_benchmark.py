"""The benchmark measures what it says: turns are taken, ratios are of rounds, peers compute the same."""

import json
from pathlib import Path

import pytest
import torch
from conftest import SEQ, TIED, VOCAB, Script, tiny

from lm.benchmark.config import SECTIONS as NAMES
from lm.benchmark.config import BenchmarkConfig
from lm.benchmark.measure import Figure, alternate, paired
from lm.benchmark.peers import in_transformers
from lm.benchmark.run import SECTIONS
from lm.benchmark.scale import corpus
from lm.benchmark.shapes import DEFAULT
from lm.config import BadInput
from lm.model.transformer import Transformer


def test_candidates_take_turns() -> None:
    called: list[str] = []
    times = alternate({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, 0.0, at_least=3)
    assert called == ["a", "a", "b", "b", *["a", "b"] * 3]  # two of each warm up
    assert [len(one) for one in times.values()] == [3, 3]


def test_a_ratio_is_taken_within_a_round() -> None:
    """A machine that is ten times as slow for a while changes both, not their ratio."""
    assert paired([1.0, 10.0, 1.0, 10.0, 1.0], [2.0, 20.0, 2.0, 20.0, 2.0]) == (1.0, 2.0)
    assert Figure("s", "w", 1.0, "ms", "peer", 2.0).ratio == 0.5
    assert Figure("s", "w", 1.0, "ms").ratio is None


def test_the_peer_computes_the_same() -> None:
    net = Transformer(tiny(ffn="swiglu"), TIED, vocab_size=VOCAB, seq_len=SEQ).eval()
    tokens = torch.arange(SEQ)[None]
    theirs = in_transformers(net)
    assert theirs is not None
    torch.testing.assert_close(theirs(tokens).logits, net(tokens), rtol=0, atol=2e-5)


def test_sections_are_named_and_an_unknown_one_is_refused() -> None:
    assert tuple(SECTIONS) == NAMES
    with pytest.raises(BadInput, match="only=speed: choose one of"):
        BenchmarkConfig(only=["speed"])


def test_a_large_corpus_costs_four_bytes_a_window() -> None:
    assert corpus(10**8) - corpus(10**6) == pytest.approx(4 * 10**8 / DEFAULT.time, rel=0.05)


@pytest.mark.slow
def test_the_script_prints_a_table_and_writes_its_figures(script: Script, tmp_path: Path) -> None:
    answer = script("benchmark", "only=[limits,training,starts]", "seconds=0", "output=out.json", "threads=1")
    assert answer.returncode == 0, answer.stderr
    assert "transformers" in answer.stdout
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert {one["section"] for one in figures} == {"limits", "training", "starts"}
    assert all(one["value"] > 0 for one in figures)
