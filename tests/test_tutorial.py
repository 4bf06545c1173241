"""Pages to work through, which run from top to bottom: docs/tutorial.ipynb and docs/own-variant.md."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from lm import results

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"


def test_the_notebook_has_no_outputs_and_its_links_lead_to_files() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    links = re.findall(r"\]\(([\w./-]+)\)", "".join("".join(cell["source"]) for cell in cells))
    assert len(links) > 3
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own assertions check what it says."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the kernel and the commands that it starts
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output for output in outputs) == 3
    (report,) = (output["text/markdown"] for output in outputs if "text/markdown" in output)
    assert re.search(r"\| (better|worse|equivalent|undecided) \|", report)


BLOCK = re.compile(r"^```(python|yaml|text)\n(?:# (mine[\w./]*)\n)?(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
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
    assert recorded.startswith("python -m lm ablate --config-dir mine ablation=reglu")
