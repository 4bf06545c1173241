"""evaluate: calibration and loss by frequency against computations by hand, several runs and texts in one call."""

import csv
import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from conftest import TEXT

from lm.cli.evaluate import score
from lm.config import DataConfig, DiagnosticsConfig, EvaluateConfig, UserError
from lm.data.batches import IGNORED
from lm.data.paths import listed
from lm.formats.folder import load_model, save_model
from lm.inference.details import BINS, Calibration, Details
from lm.inference.evaluate import evaluate_run
from lm.training.train import train
from tests.helpers.runs import short_run

PLAIN = ["loss", "perplexity", "bpb", "top1", "tokens", "bytes"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, a and b, that differ in their seed, and two texts."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "corpus.txt").write_text(TEXT)
    (folder / "one.txt").write_text(TEXT[:2000])
    (folder / "two, three.txt").write_text(TEXT[3000:4500])
    for seed, name in enumerate("ab"):
        train(short_run(folder / "corpus.txt", folder / name, seed=seed, diagnostics=DiagnosticsConfig(every=20)))
    return folder


def asked(place: Path, **settings: Any) -> EvaluateConfig:
    return EvaluateConfig(**{"run_dir": f"{place}/a", "threads": 1} | settings)


def answer(config: EvaluateConfig, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    score(config)
    found = capsys.readouterr()
    return json.loads(found.out), found.err


# --- calibration


def test_calibration_equals_a_computation_with_numpy() -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(0, 3, (500, 7)).astype(np.float32), rng.integers(7, size=500)
    logits[3], targets[3] = [200, 0, 0, 0, 0, 0, 0], 0  # the confidence is 1
    targets[::9] = IGNORED
    found = Calibration()
    for part in np.split(np.arange(500), [100, 101, 400]):
        found.add(torch.from_numpy(logits[part]), torch.from_numpy(targets[part]))

    scored = targets != IGNORED
    p = np.exp(logits.astype(np.float64))[scored]
    p /= p.sum(1, keepdims=True)
    confidence, right = p.max(1), p.argmax(1) == targets[scored]
    edges = np.linspace(0, 1, BINS + 1)
    inside = [(confidence >= low) & ((confidence < high) | (high == 1)) for low, high in pairwise(edges)]
    expected = [
        (low, one.sum(), confidence[one].mean(), right[one].mean())
        for low, one in zip(edges[:-1], inside, strict=True)
        if any(one)
    ]
    rows = [tuple(row[key] for key in ("from", "tokens", "confidence", "accuracy")) for row in found.bins()]
    assert np.array(rows) == pytest.approx(np.array(expected), rel=1e-5)
    by_hand = sum(one.mean() * abs(confidence[one].mean() - right[one].mean()) for one in inside if any(one))
    assert found.error == pytest.approx(by_hand, rel=1e-5)
    assert found.error > 0.3, "the targets are random"


@pytest.mark.parametrize(("right", "error"), [(3, 0.0), (4, 0.25), (1, 0.5)])
def test_the_calibration_error_is_the_distance_from_confidence_to_accuracy(right: int, error: float) -> None:
    found = Calibration()
    logits = torch.tensor([0.75, 0.25]).log().expand(4, 2) + 17.0
    found.add(logits, torch.tensor([0] * right + [1] * (4 - right)))
    assert found.error == pytest.approx(error, abs=1e-6)
    assert found.bins() == [
        {"from": 0.7, "to": 0.8, "tokens": 4, "confidence": pytest.approx(0.75), "accuracy": right / 4}
    ]


def test_an_excess_in_one_bin_does_not_make_up_for_a_lack_in_another() -> None:
    found = Calibration()
    for p, targets in ((0.75, [0, 0, 0, 0]), (0.9, [0, 0, 1, 1])):
        found.add(torch.tensor([p, 1 - p]).log().expand(4, 2), torch.tensor(targets))
    assert found.error == pytest.approx((0.25 + 0.4) / 2, abs=1e-6)


# --- by frequency


def test_losses_by_frequency_equal_a_computation_by_hand() -> None:
    train_tokens = np.repeat(np.arange(8, dtype=np.uint16), [40, 35, 30, 9, 9, 9, 1, 0])
    logits, targets = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 8
    targets[targets == 2] = IGNORED  # so the third band has no targets
    details = Details(8)
    details.add(logits, targets)
    nll = -logits.double().log_softmax(-1)
    bands = [[0], [1], [2], [3, 4], [5, 6, 7]]
    expected = []
    for i, ids in enumerate(bands):
        losses = [nll[row, one].item() for row, one in enumerate(targets.tolist()) if one in ids]
        if losses:
            counts = [int((train_tokens == one).sum()) for one in ids]
            row = {"band": i + 1, "vocabulary": len(ids), "least": min(counts), "most": max(counts)}
            expected.append({**row, "tokens": len(losses), "loss": pytest.approx(sum(losses) / len(losses), rel=1e-5)})
    assert details.scores(train_tokens)["by_frequency"] == expected
    assert [row["band"] for row in expected] == [1, 2, 4, 5]
    own = details.scores(None)
    assert own["frequency_in"] == "the scored text"
    assert {row["most"] for row in own["by_frequency"]} == {7, 8}


def test_the_bands_of_a_run_are_those_of_its_diagnostics(place: Path) -> None:
    with open(place / "a/diagnostics.csv", newline="") as file:
        *_, last = csv.DictReader(file)
    found = evaluate_run(asked(place, details=True))
    assert found["frequency_in"] == "the training text"
    rows = found["by_frequency"]
    assert {f"loss/band{row['band']}": row["loss"] for row in rows} == {
        key: float(value) for key, value in last.items() if key.startswith("loss/") and value
    }
    assert sum(row["loss"] * row["tokens"] for row in rows) / found["tokens"] == pytest.approx(found["loss"])
    bins = found["calibration"]
    assert sum(row["tokens"] for row in bins) == sum(row["tokens"] for row in rows) == found["tokens"]
    assert sum(row["accuracy"] * row["tokens"] for row in bins) / found["tokens"] == pytest.approx(found["top1"])


# --- what is printed


def test_one_run_and_one_text_are_an_object_as_ever(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, table = answer(asked(place), capsys)
    assert list(plain) == PLAIN
    assert [line.split()[0] for line in table.splitlines()] == PLAIN
    detailed, table = answer(asked(place, details=True), capsys)
    assert {key: detailed[key] for key in PLAIN} == plain
    assert list(detailed) == [*PLAIN, "ece", "calibration", "frequency_in", "by_frequency"]
    assert f"ece         {detailed['ece']:.4f}\n" in table
    assert "\nCalibration of the most probable token\nprobability  mean" in table
    assert "\nband  vocabulary  occurrences in the training text  loss" in table


def test_windows_may_be_shorter_than_the_context(place: Path) -> None:
    """Each token has less before it, so the loss is another; the tokens are the same."""
    whole, same, short = (evaluate_run(asked(place, seq_len=one)) for one in (None, 32, 8))
    assert same == whole
    assert short["tokens"] == whole["tokens"]
    assert short["loss"] != whole["loss"]
    with pytest.raises(UserError, match=f"^seq_len=33: the context of run_dir={place}/a is 32$"):
        evaluate_run(asked(place, seq_len=33))


def test_several_runs_and_texts_are_a_list_and_a_table(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"{place}/one.txt", f"{place}/two, three.txt"]
    found, table = answer(asked(place, run_dir=f"[{place}/a,{place}/b]", texts=f"{place}/[ot]*.txt"), capsys)
    assert [(one["run"], one["text"]) for one in found] == [(f"{place}/{run}", text) for run in "ab" for text in texts]
    lines = table.splitlines()
    assert lines[0].split() == ["run", "text", *PLAIN]
    assert len(lines) == 5
    for one, line in zip(found, lines[1:], strict=True):
        alone = asked(place, run_dir=one["run"], data=DataConfig(source="text", path=one["text"]))
        assert {key: one[key] for key in PLAIN} == evaluate_run(alone)
        assert line.startswith(one["run"])
        assert f"{one['loss']:.4f}" in line
    assert len({one["loss"] for one in found}) == 4
    (alone,), _ = answer(asked(place, run_dir=f"[{place}/a]"), capsys)
    assert (alone["run"], alone["text"]) == (f"{place}/a", "validation text")


@pytest.mark.parametrize("details", [False, True])
def test_weights_that_give_no_loss_are_named_and_other_runs_are_scored(
    details: bool, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, tokenizer = load_model(place / "a")
    with torch.no_grad():
        net.norm.weight.fill_(torch.nan)
    save_model(net, tokenizer, tmp_path / "model")
    config = EvaluateConfig(
        run_dir=str(tmp_path), data=DataConfig(source="text", path=str(place / "one.txt")), details=details, threads=1
    )
    with pytest.raises(UserError, match=f"run_dir={tmp_path}: the loss is nan"):
        evaluate_run(config)
    assert score(replace(config, run_dir=f"[{tmp_path},{place}/a]")) == 2
    out, err = capsys.readouterr()
    assert [one["run"] for one in json.loads(out)] == [f"{place}/a"]
    assert f"error: run_dir={tmp_path}: the loss is nan" in err


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_details_are_drawn(suffix: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = answer(asked(place, texts=f"[{place}/one.txt,{place}/one.txt]", plot=f"{tmp_path}/f.{suffix}"), capsys)
    assert "ece" in found[0]
    content = (tmp_path / f"f.{suffix}").read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
        return
    said = [element.text for element in ElementTree.fromstring(content).iter() if element.tag.endswith("text")]
    assert {"Calibration", "Loss by frequency", "a"} <= set(said)


# --- bad input


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"run_dir": "[{0}/a,{0}/c]"}, "run_dir={0}/c: no such folder; expected a run directory that train wrote"),
        ({"run_dir": "{0}/one.txt"}, "run_dir={0}/one.txt: is a file; expected a run directory that train wrote"),
        ({"run_dir": "{0}/z*"}, "run_dir={0}/z*: no such folder, and as a glob it matches none"),
        ({"run_dir": "[{0}/a,]"}, "run_dir=[{0}/a,]: a path is empty; expected run_dir=[PATH,PATH]"),
        ({"run_dir": "[{0}/a,{0}/a/model]"}, "{0}/a/model/config.yaml: No such file or directory; expected a finished"),
        ({"run_dir": "[{0}/a,{0}/damaged]", "texts": "{0}/one.txt"}, "{0}/damaged/model/config.json: "),
        ({"texts": "[{0}/one.txt,{0}/four.txt]"}, "texts={0}/four.txt: no such file, folder or glob"),
        ({"texts": "{0}/*.md"}, "texts={0}/*.md: no such file, and as a glob it matches none"),
        ({"plot": "{0}/absent/f.svg"}, "plot={0}/absent/f.svg: {0}/absent is no folder"),
    ],
)
def test_a_mistake_is_told_before_anything_is_scored(
    settings: dict[str, str], said: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (place / "damaged").exists():
        shutil.copytree(place / "b", place / "damaged")
        (place / "damaged/model/config.json").write_text("{}")
    monkeypatch.setattr("lm.inference.evaluate.evaluate_run", lambda *_: pytest.fail("scored"))
    with pytest.raises(UserError) as refused:
        score(asked(place, **{key: value.format(place) for key, value in settings.items()}))
    assert str(refused.value).startswith(said.format(place))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"plot": "f.pdf"}, r"^plot=f\.pdf: "),
        ({"data": DataConfig(seq_len=4)}, r"^data\.seq_len=4: is for training; give seq_len=4$"),
        ({"seq_len": 0}, "seq_len=0"),
        ({"texts": "a", "data": DataConfig()}, "texts=a"),
    ],
)
def test_a_contradiction_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        EvaluateConfig(run_dir="r", **settings)


def test_a_list_is_in_brackets_and_a_name_that_exists_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "[a,b]").mkdir()
    (tmp_path / "file").touch()
    assert listed(f"{tmp_path}/[a,b]", "run_dir") == [f"{tmp_path}/[a,b]"]
    assert listed(f"[x y, {tmp_path}/f*,http://h/*]", "texts") == ["x y", f"{tmp_path}/file", "http://h/*"]
    assert listed(f"{tmp_path}/*", "run_dir", folders=True) == [f"{tmp_path}/[a,b]"]
