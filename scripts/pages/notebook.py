"""The notebooks of docs/, executed. `python -m scripts.pages.notebook [NAME]` writes their outputs into them."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))


def executed(path: Path, folder: str | Path) -> Any:
    """A notebook with its outputs, in a folder of its own; its kernel and the commands there run this code."""
    import nbformat
    from nbclient import NotebookClient

    os.environ["PYTHONPATH"] = str(ROOT)
    notebook = nbformat.read(path, as_version=4)
    options = {
        "timeout": 600,
        "record_timing": False,
        "coalesce_streams": True,
        "resources": {"metadata": {"path": str(folder)}},
    }
    NotebookClient(notebook, **options).execute()
    return notebook


if __name__ == "__main__":
    import nbformat

    for path in NOTEBOOKS if len(sys.argv) < 2 else [ROOT / "docs" / f"{sys.argv[1]}.ipynb"]:
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(path, folder)
        notebook.metadata = nbformat.read(path, as_version=4).metadata  # not the version of Python
        nbformat.write(notebook, path)
