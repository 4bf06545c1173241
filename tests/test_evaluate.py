"""evaluate: scores against computations by hand, several runs and texts, and the tasks for lm-evaluation-harness."""

import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from lm.cli.arguments import parse
from lm.cli.evaluate import EvaluateConfig, score
from lm.config import DataConfig, TokenizerConfig
from lm.data.batches import IGNORED
from lm.data.tokenizer import byte_tokenizer
from lm.folder import WEIGHTS, load_model, read_settings
from lm.lab.formats.huggingface import export
from lm.lab.measures.details import Details, frequency_bands
from lm.training.train import train
from tests.helpers import ROOT
from tests.helpers.refusals import refused
from tests.helpers.runs import evaluate_run, result, short_run
from tests.helpers.texts import write_rows
from tests.helpers.tiny import TEXT

PLAIN = ["loss", "perplexity", "bpb", "top1", "tokens", "bytes"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two runs, a and b, that differ in their seed, and two texts."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "corpus.txt").write_text(TEXT)
    (folder / "one.txt").write_text(TEXT[:2000])
    (folder / "two, three.txt").write_text(TEXT[3000:4500])
    for seed, name in enumerate("ab"):
        train(short_run(folder / "corpus.txt", folder / name, seed=seed, tokenizer=TokenizerConfig(vocab_size=300)))
    shutil.copytree(folder / "b", folder / "damaged")
    (folder / "damaged/model/config.json").write_text("{}")
    shutil.copytree(folder / "b/model", folder / "bare")
    return folder


def asked(place, **settings):
    return EvaluateConfig(**{"run_dir": f"{place}/a", "threads": 1} | settings)


def scored(place, text=None, **settings):
    """The scores of a run in the folder, on its validation text or on a file in the folder."""
    data = None if text is None else DataConfig(source="text", path=f"{place}/{text}")
    return evaluate_run(asked(place, data=data, **settings))


def answer(config, capsys):
    score(config)
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_bits_per_byte_are_of_the_bytes_and_what_only_begins_a_text_is_not_scored(tmp_path):
    """As <|begin_of_text|> of Llama 3 after end of text: both stand before each document."""
    backend, begin = Backend.from_str(byte_tokenizer().to_json()), "<|begin_of_text|>"
    backend.add_special_tokens([begin])
    backend.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 257)])
    backend.save(str(tmp_path / "tokenizer.json"))
    rows = [f"def f{i}(x): return {i}" for i in range(40)]
    for name, part in (("train", rows), ("val", rows[:9])):
        write_rows(tmp_path / f"{name}.jsonl", part)
    run = short_run(tmp_path / "train.jsonl", tmp_path / "run")
    run.tokenizer = TokenizerConfig(kind="file", vocab_size=None, path=str(tmp_path / "tokenizer.json"))
    run.data = replace(run.data, source="json", val_path=str(tmp_path / "val.jsonl"))
    train(run)
    own = scored(tmp_path, run_dir=run.run_dir, details=True)
    net, tokenizer = load_model(tmp_path / "run")
    n_bytes = len("".join(rows[:9]))
    assert (own["bytes"], own["tokens"]) == (n_bytes, n_bytes + 8), "and end of text of all documents but the first"
    ids = torch.tensor([token for row in rows[:9] for token in (0, 257, *tokenizer.encode(row))])
    windows = [ids[i : i + net.seq_len + 1] for i in range(0, len(ids) - 1, net.seq_len)]
    nll = torch.cat([F.cross_entropy(net(w[None, :-1])[0], w[1:], reduction="none")[w[1:] != 257] for w in windows])
    assert own["loss"] == pytest.approx(nll.mean().item(), rel=1e-5)
    assert own["bpb"] == pytest.approx(nll.sum().item() / math.log(2) / n_bytes, rel=1e-5)
    assert result(tmp_path / "run")["val_bpb"] == pytest.approx(own["bpb"])
    assert sum(row["tokens"] for row in own["by_frequency"]) == own["tokens"]


def test_a_run_without_cache_has_its_own_tokenizer(place, tmp_path, monkeypatch):
    expected = scored(place)
    assert scored(place, run_dir=f"{place}/a/model") == expected
    shutil.move(place / "cache", tmp_path / "cache")
    monkeypatch.setattr("lm.data.tokenizer.train_bpe", None)
    assert scored(place) == expected


def test_losses_by_target_and_frequency_equal_a_computation_by_hand():
    train_tokens = np.repeat(np.arange(8, dtype=np.uint16), [40, 35, 30, 9, 9, 9, 1, 0])
    tokens = {1: [0], 2: [1], 3: [2], 4: [3, 4], 5: [5, 6, 7]}  # of each band
    logits, targets = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 8
    losses = F.cross_entropy(logits, targets, reduction="none")
    targets[targets == 2] = IGNORED  # so the third band has no targets
    details = Details(8, str)
    details.add(logits, targets)
    scores = details.scores(train_tokens)
    rows = scores["by_frequency"]
    counts = [(row["band"], row["vocabulary"], row["least"], row["most"]) for row in rows]
    assert counts == [(1, 1, 40, 40), (2, 1, 35, 35), (4, 2, 9, 9), (5, 3, 0, 9)]
    for row in rows:
        own = losses[torch.isin(targets, torch.tensor(tokens[row["band"]]))]
        assert (row["tokens"], row["loss"]) == (len(own), pytest.approx(own.mean().item(), rel=1e-5))
    assert frequency_bands(np.array([1, 0, 2])).tolist() == [1, 2, 0], "fewer tokens than bands"
    assert details.scores(None)["frequency_in"] == "the scored text"
    total = float(losses[targets != IGNORED].sum())
    assert {row["target"] for row in scores["by_target"]} == {*"0134567"}
    shares = [row["share"] for row in scores["by_target"]]
    assert shares == sorted(shares, reverse=True)
    for row in scores["by_target"]:
        own = losses[targets == int(row["target"])]
        assert (row["tokens"], row["loss"]) == (len(own), pytest.approx(own.mean().item(), rel=1e-5))
        assert row["share"] == pytest.approx(own.sum().item() / total, rel=1e-5)


# --- what is printed


def test_windows_may_be_shorter_than_the_context(place):
    """Each token has less before it, so the loss is another; the tokens are the same."""
    whole, same, short = (scored(place, seq_len=seq_len) for seq_len in (None, 32, 8))
    assert same == whole
    assert short["tokens"] == whole["tokens"]
    assert short["loss"] != whole["loss"]
    with refused(r"^seq_len=33: "):
        scored(place, seq_len=33)


def test_several_are_a_list_and_a_table(place, capsys):
    runs, texts = [f"{place}/a", f"{place}/b"], [f"{place}/one.txt", f"{place}/two, three.txt"]
    several = asked(place, run_dir=f"[{','.join(runs)}]", texts=f"{place}/[ot]*.txt", details=True)
    scores, table = answer(several, capsys)
    assert [(row["run"], row["text"]) for row in scores] == [(run, text) for run in runs for text in texts]
    head, *lines = table.splitlines()
    assert head.split()[: len(PLAIN) + 2] == ["run", "text", *PLAIN]
    for row, line in zip(scores, lines[:4], strict=True):
        assert line.startswith(row["run"])
        assert f"{row['loss']:.4f}" in line
    assert {key: scores[-1][key] for key in PLAIN} == scored(place, "two, three.txt", run_dir=runs[1])
    assert len({row["loss"] for row in scores}) == 4
    (alone,), _ = answer(asked(place, run_dir=f"[{place}/a]"), capsys)
    assert (alone["run"], alone["text"]) == (f"{place}/a", "validation text")


def test_a_copy_of_the_training_text_is_recognised(place, caplog):
    (place / "copy.md").write_text(TEXT)
    (place / "longer.md").write_text(f"{TEXT}more\n")
    scored(place, "longer.md")
    assert re.search("trained on a text that holds [89][0-9]% of this text", caplog.text)
    for name in ("a", "a/model"):
        caplog.clear()
        scored(place, "copy.md", run_dir=f"{place}/{name}")
        assert f"run_dir={place}/a may have been trained on a part of this text" in caplog.text
    caplog.clear()
    config = place / "a/config.yaml"
    saved = config.read_text()
    config.write_text(re.sub("^data_hash: .*", "data_hash: of another split", saved, flags=re.M))
    scored(place, "copy.md")
    config.write_text(saved)
    assert "trained on a part of this text" in caplog.text
    caplog.clear()
    (place / "held out.md").write_text(TEXT[-len(TEXT) // 10 :])
    scored(place, "held out.md")
    assert "trained on" not in caplog.text


def test_what_is_said_of_the_text_of_a_run_is_not_said_of_another_text(tmp_path, caplog):
    (tmp_path / "twice.txt").write_text(TEXT * 2)
    (tmp_path / "other.txt").write_text("0123456789 " * 50)
    train(short_run(tmp_path / "twice.txt", tmp_path / "a"))
    scored(tmp_path)
    assert "of the validation text stands in the training text too" in caplog.text
    caplog.clear()
    scored(tmp_path, "other.txt")
    assert not caplog.text


def test_a_part_of_the_text_of_a_run_before_is_recognised(place, tmp_path, caplog):
    run = shutil.copytree(place / "a", tmp_path / "a")
    (tmp_path / "other.txt").write_text("0123456789 " * 50)
    config = (run / "config.yaml").read_text().replace("corpus.txt", "other.txt")
    (tmp_path / "part.txt").write_text(TEXT[:1500])
    weights = read_settings(run / "model").sha256[WEIGHTS]
    for base, sha256, is_known in ((place / "a", weights, True), (run, "0" * 64, False)):
        caplog.clear()
        start = f"init_record:\n  sha256: '{sha256}'\n  texts: []\n"
        begun = config.replace("init_from: null", f"init_from: {base}").replace("init_record: null\n", start)
        (run / "config.yaml").write_text(begun)
        scored(tmp_path, "part.txt")
        told = f"run_dir={run} was trained on a text that holds 98% of this text" in caplog.text
        assert told == is_known, "another run may have taken the place of the run before, even this run"


def test_a_table_and_a_mark_are_read_as_training_reads_them(place, capsys, caplog):
    caplog.set_level("INFO")
    for name in ("one.jsonl", "two.jsonl"):
        write_rows(place / name, [f"def f{i}(x): return <|endoftext|>" for i in range(40)])
    alone = evaluate_run(asked(place, data=DataConfig(source="json", path=f"{place}/one.jsonl")))
    both, _ = answer(asked(place, texts=f"[{place}/one.jsonl,{place}/two.jsonl]"), capsys)
    assert [{key: row[key] for key in PLAIN} for row in both] == [{key: alone[key] for key in PLAIN}] * 2
    assert "spells <|endoftext|> 40 times" in caplog.text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("run_dir=[{0}/a,{0}/c]", "run_dir={0}/c: "),
        ("run_dir=[{0}/a,]", "run_dir=[{0}/a,]: "),
        ("run_dir=[{0}/a,{0}/bare]", "{0}/bare/config.yaml: "),
        ("run_dir=[{0}/a,{0}/damaged] texts={0}/one.txt", "{0}/damaged/model/config.json: "),
        ("run_dir={0}/a texts=[{0}/one.txt,{0}/four.txt]", "texts={0}/four.txt: "),
        ("run_dir={0}/a texts={0}/*.pdf", "texts={0}/*.pdf: "),
    ],
)
def test_a_mistake_is_told_first(words, named, place, capsys):
    with refused(f"^{re.escape(named.format(place))}"):
        score(parse(EvaluateConfig, words.format(place).split()))
    assert capsys.readouterr() == ("", "")


# --- lm-evaluation-harness, by the commands of docs/evaluation.md; most tests need the extra `eval`

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


def documents():
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "documents.py")))


def test_a_text_is_one_document_and_a_question_a_row(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\ntwo \xc3\xa9\n")
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n\n")
    assert list(documents().text(text=tmp_path / "a.txt", pretrained="x")["test"]) == [{"text": "one\r\n\ntwo é\n"}]
    assert list(documents().choices(choices=tmp_path / "q.jsonl", pretrained="x")["test"]) == QUESTIONS


def test_a_wrong_question_is_named_and_a_task_without_a_file(tmp_path):
    for line in (
        '{"question": "q", "choices": ["a"]}',
        '{"question": "q", "choices": ["a"], "answer": 1}',
        '{"question": "q", "choices": ["a", 7], "answer": 0}',
        "[1",
    ):
        (tmp_path / "q.jsonl").write_text(json.dumps(QUESTIONS[0]) + "\n" + line)
        with pytest.raises(ValueError, match=r"q\.jsonl, line 2: "):
            documents().choices(choices=tmp_path / "q.jsonl")
    for name, task in (("text", "lm_text"), ("choices", "lm_choice")):
        with pytest.raises(ValueError, match=rf"^{task}: .*--metadata "):
            getattr(documents(), name)()


# with the harness itself


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A run and its export; texts of 25 whole windows, a token being a byte, and of 25 and a half."""
    folder = tmp_path_factory.mktemp("harness")
    (folder / "corpus.txt").write_text(TEXT)
    (folder / "whole.txt").write_text(TEXT[100:900])
    (folder / "part.txt").write_text(TEXT[100:916])
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    train(short_run(folder / "corpus.txt", folder / "run"))
    export(*load_model(folder / "run"), folder / "exported")
    return folder


def harness(exported, task, file, *more):
    """Type the command of the page; the folder of its results."""
    program = Path(sys.executable).parent / "lm-eval"
    assert program.exists(), "expected the extra `eval`: pip install -e '.[dev,eval]'"
    typed = re.sub(r"\b(DIR|FILE)\b", lambda match: {"DIR": "exported", "FILE": file}[match[0]], COMMANDS[task])
    setting, _, *line = shlex.split(typed.replace("configs/lm_eval", str(FOLDER)))
    key, _, value = setting.partition("=")
    out = exported / f"out-{task}-{file}"
    words = [program, *line, "--output_path", out, *more]
    subprocess.run(words, cwd=exported, env={**os.environ, key: value}, check=True, timeout=600)
    return out


def bits_per_byte(exported, file):
    """By the harness and by evaluate."""
    (results,) = harness(exported, "lm_text", file).rglob("results_*.json")
    own = scored(exported, file, run_dir=f"{exported}/run")
    return json.loads(results.read_text())["results"]["lm_text"]["bits_per_byte,none"], own["bpb"]


@pytest.mark.lm_eval
def test_bits_per_byte_of_whole_windows_are_those_of_evaluate(exported):
    scored, expected = bits_per_byte(exported, "whole.txt")
    assert scored == pytest.approx(expected, abs=1e-5)
    scored, expected = bits_per_byte(exported, "part.txt")
    assert abs(scored - expected) > 1e-5, "the last window has more context there, as the page says"


def log_likelihood(net, tokenizer, question, choice):
    ids = [tokenizer.eot, *tokenizer.encode(question + choice)]
    with torch.no_grad():
        logits = net(torch.tensor([ids]))[0].double()
    answer = range(len(tokenizer.encode(question)) + 1, len(ids))
    return sum((logits[i - 1, ids[i]] - logits[i - 1].logsumexp(-1)).item() for i in answer)


@pytest.mark.lm_eval
def test_a_choice_has_the_likelihood_that_the_model_gives_it_after_one_end_of_text(exported):
    out = harness(exported, "lm_choice", "q.jsonl", "--log_samples")
    (samples,) = out.rglob("samples_lm_choice_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    net, tokenizer = load_model(exported / "run")
    right = []
    for row, question in zip(rows, QUESTIONS, strict=True):
        assert row["doc"] == question
        scored = [float(pair[0]) for pair in row["filtered_resps"]]
        expected = [log_likelihood(net, tokenizer, question["question"], choice) for choice in question["choices"]]
        assert scored == pytest.approx(expected, abs=1e-4)
        right.append(max(range(len(expected)), key=expected.__getitem__) == question["answer"])
    (results,) = out.rglob("results_*.json")
    assert math.isclose(json.loads(results.read_text())["results"]["lm_choice"]["acc,none"], sum(right) / len(right))
