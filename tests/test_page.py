"""The page about a single run, and the samples that are taken during its training."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from conftest import TEXT, TINY_RUN
from lm.report.metrics import after

from lm.cli import report
from lm.cli.compose import compose
from lm.config import RunConfig, UserError
from lm.training.run_directory import read_samples
from lm.training.train import train

PROMPTS = ["def f0(x", "</code><script>alert(1)</script>"]
OPTIONS = ["trainer.max_steps=20", "validation.every=5", "checkpoint.every=5", "checkpoint.keep=4", "model.dropout=0.1"]


def trained(folder: Path, name: str, prompts: Sequence[str]) -> dict[str, Any]:
    (folder / "corpus.txt").write_text(TEXT)
    places = [f"data.path={folder}/corpus.txt", f"run_dir={folder}/{name}"]
    run = compose("train", [*TINY_RUN, *OPTIONS, *places], RunConfig)
    return train(replace(run, prompts=list(prompts)))[1]


@pytest.mark.slow
def test_samples_during_training_change_nothing_and_survive_a_resume(tmp_path: Path) -> None:
    trained(tmp_path, "plain", [])
    assert not (tmp_path / "plain/samples.jsonl").exists()
    result, run = trained(tmp_path, "run", PROMPTS), tmp_path / "run"
    assert (run / "metrics.csv").read_bytes() == (tmp_path / "plain/metrics.csv").read_bytes()
    whole = (run / "samples.jsonl").read_bytes()
    lines = read_samples(run / "samples.jsonl")
    assert [(row["step"], row["tokens"]) for row in lines] == [(5, 640), (10, 1280), (15, 1920)]
    assert [[pair["prompt"] for pair in row["samples"]] for row in lines] == [PROMPTS] * 3
    with open(run / "samples.jsonl", "ab") as file:
        file.write(b'{"step": 16, "tok')  # its process was killed
    (run / "result.json").unlink()
    for path in run.glob("checkpoints/*"):
        if int(path.stem.split("-")[1]) > 10:
            path.unlink()
    again = trained(tmp_path, "run", PROMPTS)
    assert again["resumed_from"] == [10]
    assert again["samples"] == result["samples"]
    assert (run / "samples.jsonl").read_bytes() == whole


def test_a_line_of_samples_that_broke_off_is_left_out(tmp_path: Path) -> None:
    path, said = tmp_path / "samples.jsonl", [{"prompt": "I", "continuation": "Jé\n"}]
    right = [{"step": step, "tokens": 8 * step, "samples": said} for step in (5, 10)]
    whole = "".join(f"{json.dumps(row)}\n" for row in right).encode()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        found = read_samples(path)
        assert found == right[: len(found)]
        assert len(found) >= whole[:length].count(b"\n")


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(value) for key, value in attrs if key in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.words += data


def page(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Tags:
    report.run([f"run_dir={run_dir}"])
    return Tags((run_dir / "report.html").read_text())


def test_the_page_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a <b>run_*x*"
    result = trained(tmp_path, "made", PROMPTS)
    run_dir = (tmp_path / "made").rename(tmp_path / name)
    damaged = result | {"samples": [*result["samples"], {"prompt": "\x1b[31m\udc80", "continuation": "\x00"}]}
    (run_dir / "result.json").write_text(json.dumps(damaged))
    found = page(run_dir, monkeypatch)
    assert capsys.readouterr().out == f"{run_dir}/report.html: finished\n"
    assert not {"script", "b", "link", "img", "iframe"} & {*found.tags}
    assert found.tags.count("svg") == 1
    assert all(address.startswith("#") for address in found.addresses)
    assert found.words.count(name) == 2, "as the title and as the heading"
    for said in (
        f"{result['val_loss']:.4f} nats per token",
        f"zlib {result['baselines_bpb']['zlib']:.3f}",
        f"{result['n_params']:,}",
        *(f"{count:,}" for count in result["n_params_by_role"].values()),
        *("train/loss", "val/loss", "training tokens"),
        *("model.dropout", "after 5 steps", "after 15 steps", "at the end"),
        *PROMPTS,
        r"\x1b[31m\udc80",
        result["data_hash"],
    ):
        assert said in found.words
    rows = re.findall(r"(model\.n_heads|optim\.betas|model\.d_model)\s+(\S+)\s+(\S+)", found.words)
    assert rows == [("model.d_model", "32", "128")]


def test_the_page_of_a_run_that_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, "run", PROMPTS)
    (tmp_path / "run/result.json").unlink()
    found = page(tmp_path / "run", monkeypatch)
    assert "unfinished: step 20 of 20" in found.words
    assert "svg" in found.tags
    assert "after 5 steps" in found.words
    assert "How it was made" not in found.words
    (tmp_path / "run/metrics.csv").write_text("step,tokens,val/loss\n5,-640,3.0\n")  # damaged
    assert "svg" in page(tmp_path / "run", monkeypatch).tags


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "output_dir: give output_dir=DIR of an ablation or run_dir=RUN, one of the two"),
        (["run_dir=.", "output_dir=."], "output_dir: give output_dir=DIR of an ablation or run_dir=RUN"),
        (["run_dir=none"], "run_dir=none: no such folder; expected one that train wrote"),
        (["run_dir=."], "run_dir=.: holds no config.yaml; expected the directory of a run"),
        (["."], ".: a setting is given as key=value; did you mean output_dir=.?"),
    ],
)
def test_a_mistake_is_one_line(
    line: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        report.run(line)
    assert str(caught.value).startswith(said)
    assert list(tmp_path.iterdir()) == []


def test_a_long_curve_is_gone_through_once_for_its_range() -> None:
    """A metrics.csv may have a million rows."""
    begun = []

    class Curve(dict[int, float]):
        def __iter__(self) -> Iterator[int]:
            begun.append(1)
            return super().__iter__()

    assert after(Curve({x: float(x) for x in range(1, 31)}), 3) == [float(x) for x in range(10, 31)]
    assert len(begun) == 1
