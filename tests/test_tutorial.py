"""docs/tutorial.ipynb: it runs from top to bottom; its own assertions check what it says."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"


def test_it_has_no_outputs_and_its_links_lead_to_files() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    links = re.findall(r"\]\(([\w./-]+)\)", "".join("".join(cell["source"]) for cell in cells))
    assert len(links) > 3
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the kernel and the commands that it starts
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    results = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in result for result in results) == 3
    (report,) = (result["text/markdown"] for result in results if "text/markdown" in result)
    assert re.search(r"\| (better|worse|equivalent|undecided) \|", report)
