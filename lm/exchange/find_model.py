"""The folder of a run directory that holds its model."""

from pathlib import Path

from lm.config import BadInput


def model_folder(run_dir: str | Path) -> Path:
    """The model folder of a run directory; `run_dir` may also be the model folder. Raises BadInput if there is none."""
    folder = Path(run_dir).expanduser()
    if not folder.is_dir():
        raise BadInput(f"run_dir={run_dir}: no such folder; expected a run directory that train wrote")
    if (folder / "model").is_dir():
        folder = folder / "model"
    if not (folder / "config.json").is_file():
        raise BadInput(f"run_dir={run_dir}: holds no model; expected a run directory that train has finished")
    return folder
