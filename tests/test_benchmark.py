"""The benchmark measures what it says: candidates alternate, ratios are within rounds, references compute the same."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SEQ, TIED, VOCAB, Script, tiny

from lm.model.transformer import Transformer
from scripts.benchmark.measure import Measurement, alternate, compare, median_ratio
from scripts.benchmark.models import in_transformers
from scripts.benchmark.run import SECTIONS, BenchmarkConfig, benchmark


def test_candidates_alternate_and_a_ratio_is_taken_within_a_round() -> None:
    called: list[str] = []
    calls = {name: lambda name=name: called.append(name) for name in "ab"}
    times = alternate(calls, 0.0, at_least=3)
    assert called == ["a", "a", "b", "b", *["a", "b"] * 3]  # two warm-up calls of each
    assert [len(column) for column in times.values()] == [3, 3]
    assert [name for name, *_ in compare(calls, 0.0)] == ["b"]
    assert median_ratio([1.0, 10.0, 1.0, 10.0, 1.0], [2.0, 20.0, 2.0, 20.0, 2.0]) == 0.5  # a slow machine for a while
    assert Measurement("s", "w", 1.0, "ms", "reference", 2.0).ratio == 0.5
    assert Measurement("s", "w", 1.0, "ms").ratio is None


def test_the_reference_computes_the_same() -> None:
    net = Transformer(tiny(ffn="swiglu"), TIED, vocab_size=VOCAB, seq_len=SEQ).eval()
    tokens = torch.arange(SEQ)[None]
    model = in_transformers(net)
    assert model is not None
    torch.testing.assert_close(model(tokens).logits, net(tokens), rtol=0, atol=2e-5)


@pytest.mark.nightly
def test_every_section_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    table = benchmark(BenchmarkConfig(seconds=0.0, threads=2))
    for word in (*SECTIONS, "transformers", "without", "datasets.map", "memory bandwidth", "idle"):
        assert word in table
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_the_script_prints_a_table_and_writes_json(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = script("benchmark", "only=[limits]", "seconds=0", "output=out.json", "threads=1")
    assert answer.returncode == 0, answer.stderr
    assert "memory bandwidth" in answer.stdout
    rows = json.loads((tmp_path / "out.json").read_text())["measurements"]
    assert all(row["value"] > 0 and row["section"] == "limits" for row in rows)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "onli=[limits]"])
    assert runpy.run_path(str(ROOT / "scripts/benchmark.py"))["main"]() == 2
    assert capsys.readouterr().err.count("\n") == 1
