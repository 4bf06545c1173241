"""The benchmark measures what it says: candidates alternate, ratios are within rounds, references compute the same."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SEQ, TEXT, TIED, VOCAB, Script, tiny
from test_generate import BYTE

from lm.benchmark import growth
from lm.benchmark.decoding import N_PROMPTS, prompt_lookup, run_prompts
from lm.benchmark.imported import SIZES, measure
from lm.benchmark.measure import Measurement, alternate, paired
from lm.benchmark.nanogpt import nanogpt, their_model
from lm.benchmark.reference import in_transformers
from lm.benchmark.run import SECTIONS, benchmark
from lm.benchmark.scale import corpus_memory
from lm.benchmark.shapes import DEFAULT
from lm.config import UserError
from lm.config.benchmark import SECTIONS as NAMES
from lm.config.benchmark import BenchmarkConfig
from lm.model.transformer import Transformer
from lm.training.train import train
from tests.helpers.runs import small_run


def test_candidates_alternate() -> None:
    called: list[str] = []
    times = alternate({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, 0.0, at_least=3)
    assert called == ["a", "a", "b", "b", *["a", "b"] * 3]  # two warm-up calls of each
    assert [len(one) for one in times.values()] == [3, 3]


def test_a_ratio_is_taken_within_a_round() -> None:
    """A machine that is ten times slower for a while changes both times, not their ratio."""
    assert paired([1.0, 10.0, 1.0, 10.0, 1.0], [2.0, 20.0, 2.0, 20.0, 2.0]) == (1.0, 2.0)
    assert Measurement("s", "w", 1.0, "ms", "reference", 2.0).ratio == 0.5
    assert Measurement("s", "w", 1.0, "ms").ratio is None


def test_the_reference_computes_the_same() -> None:
    net = Transformer(tiny(ffn="swiglu"), TIED, vocab_size=VOCAB, seq_len=SEQ).eval()
    tokens = torch.arange(SEQ)[None]
    theirs = in_transformers(net)
    assert theirs is not None
    torch.testing.assert_close(theirs(tokens).logits, net(tokens), rtol=0, atol=2e-5)


def test_sections_are_named_and_an_unknown_one_is_refused() -> None:
    assert tuple(SECTIONS) == NAMES
    with pytest.raises(UserError, match="only=speed: choose one of"):
        BenchmarkConfig(only=["speed"])


def test_each_section_has_the_threads_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(device: str, seconds: float) -> Iterator[Measurement]:
        yield Measurement("s", "threads", torch.get_num_threads(), "")
        torch.set_num_threads(1)

    before = torch.get_num_threads()
    for name in ("limits", "startup"):
        monkeypatch.setitem(SECTIONS, name, threads)
    try:
        table = benchmark(BenchmarkConfig(threads=2, only=["limits", "startup"]))
    finally:
        torch.set_num_threads(before)
    assert [line.split()[2] for line in table.splitlines() if line.startswith("s ")] == ["2", "2"]


def test_a_large_corpus_costs_four_bytes_a_window() -> None:
    assert corpus_memory(10**8) - corpus_memory(10**6) == pytest.approx(4 * 10**8 / DEFAULT.time, rel=0.05)


@pytest.mark.slow
def test_growth_is_measured_from_real_runs_and_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"STEPS": (10, 30), "RUNS": 20, "LINE": 30_000, "FILES": 10, "RACY": 0, "alone": growth.measured}
    for name, value in small.items():
        monkeypatch.setattr(growth, name, value)
    found = {one.name: one for one in growth.growth("cpu", 0.0)}
    assert len(found) == 1 + 2 * (1 + 3 * 2 + 2)  # of runs, of three kinds of two lines, of two starts
    times = [one for name, one in found.items() if name.startswith("time")]
    assert all(one.value > 0 and one.reference_value for one in times)
    assert len(growth.words(1000)) == 1000


@pytest.mark.slow
def test_a_folder_of_transformers_is_read_exactly_and_in_little_memory() -> None:
    narrow = {"vocab_size": 8192, "n_embd": 512, "n_layer": 5, "n_head": 8}
    found = {one.name: one for one in measure("GPT-2", SIZES["GPT-2"] | narrow)}
    logits, changed, memory, seconds = found.values()
    assert logits.ratio is not None
    assert logits.ratio <= 1
    assert changed.value == 0
    assert memory.ratio is not None
    assert memory.ratio < 1.5  # 2 if the pages of the file stay
    assert seconds.value > 0


def trained(corpus: Path, run_dir: Path, **model: Any) -> str:
    """A run of one step."""
    train(small_run(corpus, run_dir, max_steps=1, model=tiny(ffn="swiglu", **model)))
    return str(run_dir)


@pytest.mark.slow
def test_the_prompts_of_a_run_are_from_its_validation_text(tmp_path: Path, corpus: Path) -> None:
    run = run_prompts(trained(corpus, tmp_path / "run"))
    assert run.prompts.shape == (N_PROMPTS, 32 // 4)
    assert all(BYTE.decode(prompt.tolist()) in TEXT for prompt in run.prompts[1:])  # the first begins with end of text
    found = list(prompt_lookup(run, "cpu", 0.0))
    assert [one.reference for one in found] == ["one token per pass", "transformers", "transformers, prompt lookup"]
    assert all(one.name == "run, prompt-lookup decoding" and one.value > 0 for one in found)


def test_a_run_that_cannot_be_exported_is_compared_with_one_token_per_pass(tmp_path: Path, corpus: Path) -> None:
    run = run_prompts(trained(corpus, tmp_path / "run", position="none"))
    assert [one.reference for one in prompt_lookup(run, "cpu", 0.0)] == ["one token per pass"]


def test_a_run_that_cannot_be_read_is_refused_before_anything_is_measured(tmp_path: Path, corpus: Path) -> None:
    run_dir = trained(corpus, tmp_path / "run")
    corpus.write_text("something else " * 1000)
    with pytest.raises(UserError, match="its text has changed"):
        benchmark(BenchmarkConfig(run_dir=run_dir, only=["limits", "decoding"], output=str(tmp_path / "out.json")))
    assert not (tmp_path / "out.json").exists()
    with pytest.raises(UserError, match="absent: no such folder"):
        benchmark(BenchmarkConfig(run_dir=str(tmp_path / "absent")))


STAND_IN = """
from dataclasses import dataclass
import torch

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        print("number of parameters: few")
        assert config.bias and config.n_layer == 4 and config.n_embd == 128
        self.embed = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas)

    def forward(self, x, y):
        logits = self.embed(x)
        return logits, torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
"""


@pytest.mark.slow
def test_a_clone_of_nanogpt_is_measured_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(STAND_IN)
    found = list(nanogpt("cpu", 0.0, their_model(str(tmp_path))))
    assert list(dict.fromkeys(one.name.rpartition(",")[0] for one in found)) == [
        "step time, nanoGPT on a CPU",
        "step time, default",
    ]
    assert all(one.reference == "nanoGPT" and one.reference_value and one.ratio for one in found)
    assert capsys.readouterr().out == ""
    assert list(nanogpt("cpu", 0.0)) == []


@pytest.mark.parametrize("source", ["1 / 0", "class GPT: pass"])
def test_a_folder_that_is_no_clone_of_nanogpt_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "model.py").write_text(source)
    with pytest.raises(UserError, match=r"nanogpt=.*: expected a clone of nanoGPT \((Zero|Attribute)"):
        benchmark(BenchmarkConfig(nanogpt=str(tmp_path), only=["limits", "nanogpt"], output=str(tmp_path / "out.json")))
    assert not (tmp_path / "out.json").exists()
    with pytest.raises(UserError, match=r"nanogpt=.*: expected a clone of nanoGPT \(FileNotFound"):
        benchmark(BenchmarkConfig(nanogpt=str(tmp_path / "absent"), only=["nanogpt"]))


@pytest.mark.slow
def test_the_script_prints_a_table_and_writes_json(script: Script, tmp_path: Path) -> None:
    answer = script(
        "benchmark", "only=[limits,training,compile,documents,startup]", "seconds=0", "output=out.json", "threads=1"
    )
    assert answer.returncode == 0, answer.stderr
    assert "transformers" in answer.stdout
    found = json.loads((tmp_path / "out.json").read_text())["measurements"]
    assert {one["section"] for one in found} == {"limits", "training", "compile", "documents", "startup"}
    assert all(one["value"] > 0 for one in found)
