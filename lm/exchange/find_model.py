"""Where a run directory keeps its model."""

from pathlib import Path

from lm.config import BadInput


def model_folder(run_dir: str | Path) -> Path:
    """Where a run keeps its model; `run_dir` may be that folder itself. Raises BadInput where there is none."""
    folder = Path(run_dir).expanduser()
    if not folder.is_dir():
        raise BadInput(f"run_dir={run_dir}: no such folder; expected a run directory that train.py wrote")
    if (folder / "model").is_dir():
        folder = folder / "model"
    if not (folder / "config.json").is_file():
        raise BadInput(f"run_dir={run_dir}: holds no model; expected a run directory that train.py has finished")
    return folder
