"""Results as pandas frames: the runs, curves and contrasts of a folder, in one call each.

`folder` is an ablation, or holds ablations at any depth. For `runs` and `curves` it may also be a run directory or a
folder of runs; a folder that holds ablations too is read as a folder of ablations. Of an ablation there is only what
its report rests on: runs that it no longer asks for, and runs of a pilot alone, are rows of results.csv.
Calls only read files. They raise UserError, a ValueError, naming what is wrong.

The first columns say which run a row is about: `ablation` (its folder below `folder`), `arm`, `seed`, `factor` (of the
tuned setting; 1 in an arm that is not tuned) and `run_dir` (below the ablation's folder). Of runs without an ablation:
`run_dir` (below `folder`) and `seed`. Integers are Int64 and other numbers float64; what is not known is missing.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import pandas as pd

from lm.config import flat
from lm.errors import UserError
from lm.folder import folders_with
from lm.lab.ablation.folder import FILE as RECORD
from lm.lab.ablation.folder import RESULT, finite, frame_of
from lm.lab.ablation.judge import Contrast
from lm.lab.ablation.results import Results, read_results
from lm.lab.runs.find import FoundRun, differing, find_runs, places_with, without_parts_of_the_head
from lm.lab.runs.listing import check_key
from lm.training.run_directory import METRICS, read_rows

Columns = Mapping[str, type | None]  # None: as the values are
STATUS = {"finished": "done", "unfinished": "missing", "broken": "failed"}  # of a run: as an ablation says it
SCORES: Columns = {key: kind for key, kind in RESULT.items() if key not in ("torch", "resumed_from")}
COUNTS: Columns = {"step": int, "tokens": int, "val/tokens": int}  # of metrics.csv; its other columns are floats


class _Run(NamedTuple):
    identity: dict[str, Any]  # the columns that say which run it is
    run: FoundRun
    lines: Callable[[], list[dict[str, str]]]  # of its metrics.csv


def runs(folder: str | Path, settings: Sequence[str] | None = None) -> pd.DataFrame:
    """Return a row for each reported run, also for one without a result.

    Columns: which run it is; `status` (done, diverged, failed, killed, or missing) and `error`; one for each of
    `settings`, dotted keys such as `optim.lr`, by default those that differ between the runs; `val_loss` (nats per
    token), `val_bpb` (bits per byte), `val_top1` (0 to 1), `n_params`, `flops_per_token` (forward and backward),
    `steps` and `tokens` of training, `seconds`, `tokens_per_second`, then hashes, machine and versions.
    """
    which, records = _read_runs(folder)
    listed = [record.run for record in records]
    keys = without_parts_of_the_head(differing(listed), listed) if settings is None else settings
    keys = [keys] if isinstance(keys, str) else keys
    for key in keys:
        check_key("settings", key, listed)
    rows = []
    for identity, run, _ in records:
        row = {key: run[key] for key in keys} | {key: run.result.get(key) for key in SCORES} | identity
        row["torch"] = run.result.get("torch", run.result.get("versions.torch"))
        rows.append(row | {"status": STATUS.get(run.status, run.status), "error": run.note})
    first: Columns = {**which, "status": str, "error": str}
    return frame_of(rows, {**first, **{key: None for key in keys if key not in first}, **SCORES, "torch": str})


def curves(folder: str | Path, metric: str = "val/loss") -> pd.DataFrame:
    """Return a row for each step at which a reported run has logged a finite `metric`, in the order of training.

    Columns: which run it is, `step` and `tokens` so far, and the others of metrics.csv: `lr`, `train/loss` (of one
    batch, nats per token), `train/grad_norm`, `val/loss` (nats per token), `val/bpb` (bits per byte), `val/top1` (0 to
    1) and `val/tokens`, how many tokens were scored: a part of the validation text, and in the last row all of it;
    where that is missing, a part throughout. Without the folders of its runs an ablation has its validations only.
    """
    which, records = _read_runs(folder)
    lines = [(record.identity, line) for record in records for line in record.lines()]
    names = dict.fromkeys(key for _, line in lines for key in line if key != "run_dir")
    if names and metric not in names:
        raise UserError(f"metric={metric}: is no column of {METRICS}; choose one of {', '.join(names)}")
    columns = [*dict.fromkeys([*COUNTS, metric, *names])]
    points = frame_of([line | identity for identity, line in lines], {**which, **dict.fromkeys(columns, str)})
    points[columns] = finite(points[columns])
    kinds = dict.fromkeys(columns, "float64") | dict.fromkeys(COUNTS, "Int64")
    return points[points[metric].notna()].astype(kinds).reset_index(drop=True)


def contrasts(folder: str | Path) -> pd.DataFrame:
    """Return a row for each comparison of an arm with its baseline, then for each weighted sum, as in its report.

    Columns: `ablation`, then the fields of a Contrast: `name`, `family` (primary, secondary or weighted, within which p
    values are adjusted), `primary`, `arm`, `baseline`, `metric`, `budget`; over `n_seeds` pairs and in the metric's
    unit (val_loss: nats per token) `mean_difference`, arm minus baseline, its interval `ci_low` to `ci_high` at the
    level `alpha` (0.05: 95 %; less with planned looks), the `equivalence_margin`, and `sd` of a difference; `wins`, the
    pairs in which the arm is better; p values, also adjusted for the comparisons of this ablation; the
    `minimum_detectable` difference, and the `seeds_needed` to detect the margin; `verdict`, `undecided_by`, and
    `sentence`. Of a weighted sum `arm` is its name and `baseline` its formula.
    """
    top = Path(os.path.expanduser(folder))
    return contrasts_of(_ablations(places_with([RECORD], top, RECORD)))


def contrasts_of(ablations: Mapping[str, Results]) -> pd.DataFrame:
    """Return the contrasts of ablations, by name."""
    kinds = {key: kind for key, kind in get_type_hints(Contrast).items() if get_origin(kind) not in (list, dict)}
    rows = [
        {"ablation": name} | {key: getattr(contrast, key) for key in kinds}
        for name, ablation in ablations.items()
        for contrast in ablation.contrasts
    ]
    columns = {key: next(iter(get_args(kind)), kind) for key, kind in kinds.items()}  # float of float | None
    return frame_of(rows, {"ablation": str, **columns})


def _ablations(places: Mapping[str, Path]) -> dict[str, Results]:
    return {name: read_results(place) for name, place in places.items()}


def _read_runs(folder: str | Path) -> tuple[Columns, list[_Run]]:
    """Return the runs of a folder, and the columns that say which run a row is about."""
    top = Path(os.path.expanduser(folder))
    if ablations := _ablations(folders_with([RECORD], top)):
        runs = [run for name, ablation in ablations.items() for run in _reported(name, ablation)]
        return {"ablation": str, "arm": str, "seed": int, "factor": float, "run_dir": str}, runs
    found = find_runs(top)
    runs = [
        _Run({"run_dir": run.name, "seed": run["seed"]}, run, partial(read_rows, run.path / METRICS)) for run in found
    ]
    return {"run_dir": str, "seed": int}, runs


def _reported(name: str, ablation: Results) -> Iterator[_Run]:
    for row in ablation.reported.to_dict("records"):
        run_dir = row["run_dir"]
        settings = ablation.settings_of(row)
        result = flat(dict(ablation.reader.outcome(run_dir).result))
        run = FoundRun(run_dir, ablation.folder / run_dir, row["status"], row["error"], settings, result)
        identity = {"ablation": name} | {key: row[key] for key in ("arm", "seed", "factor", "run_dir")}
        yield _Run(identity, run, partial(ablation.reader.lines, run_dir))
