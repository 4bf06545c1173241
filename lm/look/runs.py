"""What the list of runs shows: each run with its curve, whether it is being trained, and the ablation that asked."""

from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from lm.ablation.results import read_results
from lm.ablation.run_files import RunFiles
from lm.ablation.views import asked, distinct
from lm.ablation.warnings import report_warnings
from lm.config import UserError
from lm.formats.base import model_folder
from lm.look.models import checkpoint_to_show
from lm.runs.curves import read_curves
from lm.runs.find import read_run
from lm.system.terminal import duration

MAX_POINTS = 400  # of a curve


def described_run(name: str, path: Path) -> dict[str, Any]:
    """What the list shows of a run, finished or not; `curve` has training tokens, val/loss and val/bpb."""
    run = read_run(path, name)
    points: list[list[float | None]] = []
    if run.status != "broken":
        frame = read_curves(path).reindex(columns=["val/loss", "val/bpb"]).dropna(subset="val/loss")
        chosen = {i * (len(frame) - 1) // (MAX_POINTS - 1) for i in range(MAX_POINTS if len(frame) else 0)}
        points = [[float(tokens), *_numbers(*row)] for tokens, *row in frame.iloc[sorted(chosen)].itertuples(name=None)]
    scores = _numbers(run.result.get("val_loss"), run.result.get("val_bpb"))
    last_loss, last_bpb = points[-1][1:] if points and not run.result else scores
    kept = run.result.get("best.step")
    status = {"status": run.status, "note": run.note or (f"the model of step {kept:,}" if kept else "")}
    if run.status == "broken" and _has_model(path):
        status = {"status": "model", "note": "a model without a record of its training"}
    return {
        "name": name,
        **status,
        "has_model": _has_model(path) or checkpoint_to_show(path) is not None,
        "text": Path(str(run["data.path"])).name if run["data.path"] else str(run["data.source"] or ""),
        "data_hash": run["data_hash"],
        "tokenizer_hash": run["tokenizer_hash"],
        "val_loss": last_loss,
        "val_bpb": last_bpb,
        "n_params": run.result.get("n_params"),
        "step": RunFiles(path).steps() if run.status == "unfinished" else None,
        "steps": run["trainer.max_steps"],
        "curve": points,
    }


def _numbers(*values: Any) -> list[float | None]:
    return [None if isinstance(value, float) and not isfinite(value) else value for value in values]


def _has_model(path: Path) -> bool:
    with suppress(UserError, OSError):
        return bool(model_folder(path))
    return False


def described_ablation(folder: Path) -> dict[str, Any]:
    """The question of an ablation, the verdicts so far and what is left. Raises UserError."""
    results = read_results(folder)
    record, counts, runs = results.record, results.counts(), distinct(results.reported())
    to_go, seconds = counts["missing"], runs["seconds"].astype(float).median()
    left = [f"{counts['done']} of {sum(counts.values())} runs are done"]
    left += [f"{counts[status]} {status}" for status in ("failed", "diverged") if counts[status]]
    if to_go:
        left += [f"{to_go} to go" + (f", about {duration(to_go * seconds / record.workers)}" if seconds > 0 else "")]
    if untuned := record.untuned():
        left += [f"still tuned: {', '.join(untuned)}"]
    return {
        "question": record.question,
        "answers": asked(results)[["verdict", "statement"]].to_dict("records"),
        "left": "; ".join(left),
        "warnings": [warning.summary for warning in report_warnings(results)],
    }
