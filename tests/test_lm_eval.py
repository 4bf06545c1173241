"""The tasks for lm-evaluation-harness, by the commands of docs/evaluation.md. Most tests need the extra `eval`."""

import importlib.util
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, TEXT

from lm.config import DataConfig, EvaluateConfig
from lm.data.tokenizer import Tokenizer
from lm.formats.folder import load_model
from lm.formats.huggingface import export
from lm.inference.evaluate import evaluate_run
from lm.model.transformer import Transformer
from lm.training.train import train
from tests.helpers.runs import short_run

FOLDER = ROOT / "configs/lm_eval"
PAGE = (ROOT / "docs/evaluation.md").read_text().replace("\\\n", " ")
COMMANDS = {
    match[1]: line
    for line in PAGE.splitlines()
    if "lm-eval run" in line and (match := re.search(r"--tasks (\w+)", line))
}
QUESTIONS = [
    {"question": "def f3(x, y):\n    return x *", "choices": [" 21", " y", "("], "answer": 0},
    {"question": "def", "choices": [" f7(x, y):", " 7(f, y)x"], "answer": 1},
]


def documents() -> Any:
    spec = importlib.util.spec_from_file_location("documents", FOLDER / "documents.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_text_is_one_document_and_a_question_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\ntwo \xc3\xa9\n")
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n\n")
    assert list(documents().text(text=tmp_path / "a.txt", pretrained="x")["test"]) == [{"text": "one\r\n\ntwo é\n"}]
    assert list(documents().choices(choices=tmp_path / "q.jsonl", pretrained="x")["test"]) == QUESTIONS


@pytest.mark.parametrize(
    "line",
    [
        '{"question": "q", "choices": ["a"]}',
        '{"question": "q", "choices": ["a"], "answer": 1}',
        '{"question": "q", "choices": ["a"], "answer": "a"}',
        '{"question": "q", "choices": "ab", "answer": 0}',
        '{"question": "q", "choices": ["a", 7], "answer": 0}',
        "[1",
    ],
)
def test_a_wrong_question_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps(QUESTIONS[0]) + "\n" + line)
    with pytest.raises(ValueError, match=r"q\.jsonl, line 2: "):
        documents().choices(choices=tmp_path / "q.jsonl")


@pytest.mark.parametrize(("name", "task"), [("text", "lm_text"), ("choices", "lm_choice")])
def test_a_task_without_a_file_says_how_one_is_given(name: str, task: str) -> None:
    with pytest.raises(ValueError, match=rf"^{task}: name a file by --metadata "):
        getattr(documents(), name)()


# --- with the harness itself


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and its export; texts of 25 whole windows, a token being a byte, and of 25 and a half."""
    folder = tmp_path_factory.mktemp("harness")
    (folder / "corpus.txt").write_text(TEXT)
    (folder / "whole.txt").write_text(TEXT[100:900])
    (folder / "part.txt").write_text(TEXT[100:916])
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    train(short_run(folder / "corpus.txt", folder / "run"))
    export(*load_model(folder / "run"), folder / "exported")
    return folder


def harness(place: Path, task: str, file: str, *more: str) -> Path:
    """Type the command of the page; the folder of its results."""
    program = Path(sys.executable).parent / "lm-eval"
    assert program.exists(), "expected the extra `eval`: pip install -e '.[dev,eval]'"
    words = re.sub(r"\b(DIR|FILE)\b", lambda match: {"DIR": "exported", "FILE": file}[match[0]], COMMANDS[task])
    setting, _, *line = shlex.split(words.replace("configs/lm_eval", str(FOLDER)))
    key, _, value = setting.partition("=")
    out = place / f"out-{task}-{file}"
    subprocess.run(
        [program, *line, "--output_path", out, *more],
        cwd=place,
        env={**os.environ, key: value},
        check=True,
        timeout=600,
    )
    return out


def bits(place: Path, file: str) -> tuple[float, float]:
    """By the harness and by evaluate."""
    (results,) = harness(place, "lm_text", file).rglob("results_*.json")
    data = DataConfig(source="text", path=str(place / file))
    own = evaluate_run(EvaluateConfig(run_dir=str(place / "run"), data=data, threads=1))
    return json.loads(results.read_text())["results"]["lm_text"]["bits_per_byte,none"], own["bpb"]


@pytest.mark.lm_eval
def test_bits_per_byte_of_whole_windows_are_those_of_evaluate(place: Path) -> None:
    scored, expected = bits(place, "whole.txt")
    assert scored == pytest.approx(expected, abs=1e-5)
    scored, expected = bits(place, "part.txt")
    assert abs(scored - expected) > 1e-5, "the last window has more context there, as the page says"


def log_likelihood(net: Transformer, tokenizer: Tokenizer, question: str, choice: str) -> float:
    ids = [tokenizer.eot, *tokenizer.encode(question + choice)]
    with torch.no_grad():
        logits = net(torch.tensor([ids]))[0].double()
    answer = range(len(tokenizer.encode(question)) + 1, len(ids))
    return sum((logits[i - 1, ids[i]] - logits[i - 1].logsumexp(-1)).item() for i in answer)


@pytest.mark.lm_eval
def test_a_choice_has_the_likelihood_that_the_model_gives_it_after_one_end_of_text(place: Path) -> None:
    out = harness(place, "lm_choice", "q.jsonl", "--log_samples")
    (samples,) = out.rglob("samples_lm_choice_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    net, tokenizer = load_model(place / "run")
    right = []
    for row, question in zip(rows, QUESTIONS, strict=True):
        assert row["doc"] == question
        scored = [float(pair[0]) for pair in row["filtered_resps"]]
        expected = [log_likelihood(net, tokenizer, str(question["question"]), choice) for choice in question["choices"]]
        assert scored == pytest.approx(expected, abs=1e-4)
        right.append(max(range(len(expected)), key=expected.__getitem__) == question["answer"])
    (results,) = out.rglob("results_*.json")
    assert math.isclose(json.loads(results.read_text())["results"]["lm_choice"]["acc,none"], sum(right) / len(right))
