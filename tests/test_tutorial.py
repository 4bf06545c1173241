"""Pages to work through, which run from top to bottom: the notebooks in docs/ and docs/own-variant.md."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from lm import results
from tests.helpers.notebook import NOTEBOOKS, executed

HOST = re.escape(socket.gethostname())
PRIVATE = rf"/(home|root|tmp|usr|work)/|\b{HOST}\b|tokens per s|\d\d:\d\d:\d\d|\b\d+ (s|min) "  # and no times


def kinds(cells: list[Any]) -> list[list[str]]:
    """The kinds of the outputs of each cell."""
    return [[output["output_type"] for output in cell.get("outputs", ())] for cell in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_its_outputs_and_its_links_lead_to_files(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}, "errors are no boxes in red"
    texts = [output | {"data": {**output.get("data", {}), "image/png": ""}} for output in outputs]
    assert len(texts) > 4
    assert re.findall(PRIVATE, json.dumps(texts)) == []
    links = re.findall(r"\]\(([\w./-]+)\)", "".join("".join(cell["source"]) for cell in cells))
    assert len(links) > 2
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    """Its own assertions check what it says. Figures differ between machines, and are not compared."""
    cells = executed(path, tmp_path).cells
    assert kinds(cells) == kinds(json.loads(path.read_text())["cells"])
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    if path.stem == "tutorial":
        assert sum("image/png" in output for output in outputs) == 3
        (report,) = (output["text/markdown"] for output in outputs if "text/markdown" in output)
        assert re.search(r"\| (better|worse|equivalent|undecided) \|", report)
    else:
        assert re.search(r"\b(better|worse|equivalent|undecided)\b", json.dumps(cells[-1]["outputs"]))


BLOCK = re.compile(r"^```(python|yaml|text)\n(?:# (mine[\w./]*)\n)?(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.nightly
def test_a_class_gets_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for language, name, content in BLOCK.findall((ROOT / "docs/own-variant.md").read_text()):
        if name:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(content)
        elif language == "python":
            exec(content, {})
        else:
            for line in content.replace("\\\n", "").splitlines():
                words, _, file = line.partition(" > ")
                run = [sys.executable, *shlex.split(words)[1:]]
                done = subprocess.run(run, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True)
                assert done.returncode == 0, done.stderr
                if file:
                    Path(file).write_text(done.stdout)
    assert capsys.readouterr().out.split()[0] in ("better", "worse", "equivalent", "undecided")
    runs = results.runs(tmp_path / "ablations/reglu", settings=["model.ffn"])
    sizes = runs.groupby(["arm", "model.ffn"]).size().to_dict()
    assert sizes == {("reglu", "mine.ReGLU"): 3, ("swiglu", "swiglu"): 3}
    assert runs["n_params"].nunique() == 1
    recorded = json.loads(Path("ablations/reglu/ablation.json").read_text())["command"]
    assert recorded.startswith(f"{sys.executable} -m lm ablate --config-dir mine ablation=reglu")
