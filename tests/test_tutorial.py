"""docs/tutorial.ipynb: it runs from top to bottom; its own assertions check what it says."""

import re
from pathlib import Path

import pytest
from conftest import ROOT

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the kernel and the commands that it starts
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)  # committed without outputs
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    (report,) = (output["data"]["text/markdown"] for output in outputs if "text/markdown" in output.get("data", {}))
    assert re.search(r"(better|worse|undecided|equivalent)", report)
