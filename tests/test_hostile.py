"""Files and words of strangers, and files that fail: one line for each, no hang, nothing that steers a terminal."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HEADS, SEQ, tiny

from lm.config import UserError
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.data.vocabulary import byte_tokenizer
from lm.inference.evaluate import Scores
from lm.inference.generate import generate
from lm.inference.text import from_above
from lm.model.transformer import Transformer
from lm.report.figures import shorten
from lm.report.pages import render

# --- terminals, names


def test_no_text_in_a_report_steers_a_terminal() -> None:
    answer = {"statement": "a\x1b[31m: b"}
    context = {"answers": [answer], "basis": [], "comparisons": [], "interactions": [], "warnings": []}
    flags = {"running": False, "several_budgets": False, "with_regret": False}
    assert "\x1b" not in render("ablation.md.j2", title="b\x1b[31m", unit="", ci="", digits=3, **context, **flags)
    assert "\x1b" not in shorten("a\x1b[31m")


# --- tokenizers

Step = dict[str, Any]
TWICE: Step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
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
        {"decoder": {"type": "Sequence", "decoders": [TWICE] * 30}},
    ],
)
def test_a_tokenizer_that_multiplies_a_text_is_refused(steps: dict[str, Step], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{next(iter(steps))}: makes up to .* characters of one, expected at most 100"):
        load_tokenizer(with_step(tmp_path, **steps))


def test_a_tokenizer_that_marks_the_beginning_of_a_text_is_read(tmp_path: Path) -> None:
    assert load_tokenizer(with_step(tmp_path, normalizer=MARK)).encode("a") == byte_tokenizer().encode("_b")


def test_a_file_that_the_library_panics_at_is_named_without_its_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer\.json \(Precompiled"):
        load_tokenizer(with_step(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}))
    assert capfd.readouterr().err == ""


def test_a_panic_of_the_tokenizer_is_bad_input(tmp_path: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(with_step(tmp_path, normalizer=SLOW))
    with pytest.raises(UserError, match="tokenizer: its library gives up on this text"):
        tokenizer.encode("a" * 40 + "!")


# --- models and results of somebody else


def test_weights_that_are_no_numbers_do_not_decode() -> None:
    net = Transformer(tiny(), HEADS["tied"], vocab_size=257, seq_len=SEQ)
    torch.nn.init.constant_(net.norm.weight, math.nan)
    with pytest.raises(UserError, match="the model's logits are not numbers"):
        generate(net, byte_tokenizer(), "a")


def test_a_perplexity_beyond_all_numbers_is_null() -> None:
    assert Scores(1, 800.0, 0).perplexity is None


def test_the_text_of_a_run_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "runs/one").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert from_above(tmp_path / "runs/one", "a.txt") == str(tmp_path.resolve() / "a.txt")
    assert from_above(tmp_path / "runs/one", "b.txt") == "b.txt"
    (tmp_path / "elsewhere/a.txt").touch()
    assert from_above(tmp_path / "runs/one", "a.txt") == "a.txt"
