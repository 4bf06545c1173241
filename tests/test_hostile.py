"""Files and words of strangers, and files that fail: one line for each, no hang, nothing that steers a terminal."""

import errno
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HEADS, SEQ, tiny

from lm.ablation.report.seeds import seeds as draw_seeds
from lm.config import BadInput, ModelConfig
from lm.config.checks import LARGEST
from lm.config.optim import OptimConfig
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.data.vocabulary import byte_tokenizer
from lm.inference.evaluate import Scores, evaluate
from lm.inference.generate import generate
from lm.inference.text import from_above
from lm.model.transformer import Transformer
from lm.report.page import code, fence, plain
from lm.report.plots import short
from lm.system.files import sync_folder
from lm.training.run_directory import read_samples

# --- errors


def raised(work: Callable[[], object]) -> OSError:
    with pytest.raises(OSError, match="error") as caught:
        work()
    return caught.value


def test_an_error_of_syncing_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    assert raised(lambda: sync_folder(tmp_path)).filename == str(tmp_path)


# --- terminals, names


@pytest.mark.parametrize("form", [plain, code, fence, short])
def test_no_text_in_a_report_steers_a_terminal(form: Callable[[str], str]) -> None:
    assert "\x1b" not in form("a\x1b[31m")


# --- tokenizers

Step = dict[str, Any]
TWICE: Step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
LONG: Step = {"type": "Replace", "pattern": {"Regex": "."}, "content": "b" * 1000}
SLOW: Step = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
MARK: Step = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}, {**TWICE, "content": "b"}]}


def with_step(folder: Path, **steps: Step) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(byte_tokenizer().to_json()) | steps))
    return path


@pytest.mark.parametrize(
    "steps",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [TWICE] * 30}},
        {"normalizer": {"type": "Prepend", "prepend": "b" * 1000}},
        {"normalizer": LONG},
        {"decoder": {"type": "Sequence", "decoders": [TWICE] * 30}},
    ],
)
def test_a_tokenizer_that_multiplies_a_text_is_refused(steps: dict[str, Step], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"{next(iter(steps))}: makes up to .* characters of one, expected at most 100"):
        load_tokenizer(with_step(tmp_path, **steps))


def test_a_tokenizer_that_marks_the_beginning_of_a_text_is_read(tmp_path: Path) -> None:
    assert load_tokenizer(with_step(tmp_path, normalizer=MARK)).encode("a") == byte_tokenizer().encode("_b")


def test_a_file_that_the_library_panics_at_is_named_without_its_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadInput, match=r"tokenizer\.json: not a tokenizer\.json \(Precompiled"):
        load_tokenizer(with_step(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}))
    assert capfd.readouterr().err == ""


def test_a_panic_of_the_tokenizer_is_bad_input(tmp_path: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(with_step(tmp_path, normalizer=SLOW))
    with pytest.raises(BadInput, match="tokenizer: its library gives up on this text"):
        tokenizer.encode("a" * 40 + "!")


# --- sizes


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (ModelConfig, {"n_layers": 10**8}, "model.n_layers=100000000: expected at most 10000"),
        (ModelConfig, {"d_ff": 10**20}, f"model.d_ff={10**20}: expected 1 or more, at most {LARGEST}"),
        (OptimConfig, {"lr": 1e300}, f"optim.lr=1e+300: expected 0 or more, at most {LARGEST}"),
    ],
)
def test_sizes_beyond_reason_are_refused(kind: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=re.escape(said)):
        kind(**settings)


# --- models and results of somebody else


def test_weights_that_are_no_numbers_do_not_decode() -> None:
    net = Transformer(tiny(), HEADS["tied"], vocab_size=257, seq_len=SEQ)
    torch.nn.init.constant_(net.norm.weight, math.nan)
    with pytest.raises(BadInput, match="the model's logits are not numbers"):
        generate(net, byte_tokenizer(), "a")


def test_a_context_of_any_length_is_scored() -> None:
    net = Transformer(tiny(position="none"), HEADS["tied"], vocab_size=257, seq_len=10**12)
    tokens = np.arange(9, dtype=np.uint16)
    assert evaluate(net, tokens, 10**12, 1) == evaluate(net, tokens, 8, 1)


def test_a_perplexity_beyond_all_numbers_is_null() -> None:
    assert json.loads(json.dumps(Scores(1, 800.0, 0).perplexity)) is None


def test_a_file_that_cannot_be_read_is_not_absent(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        read_samples(tmp_path / "samples.jsonl")


def test_the_text_of_a_run_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "runs/one").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert from_above(tmp_path / "runs/one", "a.txt") == str(tmp_path.resolve() / "a.txt")
    assert from_above(tmp_path / "runs/one", "b.txt") == "b.txt"
    (tmp_path / "elsewhere/a.txt").touch()
    assert from_above(tmp_path / "runs/one", "a.txt") == "a.txt"


def test_a_figure_of_a_hundred_seeds_has_room_for_its_legend() -> None:
    """matplotlib warns where the axes have none left, and a warning is an error here."""
    study = SimpleNamespace(
        record=SimpleNamespace(
            arms={"a": 0, "b": 0},
            budgets=["tokens"],
            seeds=[*range(110)],  # ten have no run, and no line
            baseline="a",
            primary=[],
            equivalence_margin=0.01,
        ),
        scores=lambda arm, _: {seed: 1.0 + seed / 100 + (arm == "a") for seed in range(100)},
        unit="nats",
    )
    found = draw_seeds(study)  # type: ignore[arg-type]
    assert found.count(">seed ") == 20
