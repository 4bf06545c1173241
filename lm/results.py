"""Results as pandas frames: the runs, curves, trials and contrasts of a folder, in one call each.

`folder` is that of an ablation, or one that holds ablations at any depth. For `runs` and `curves` it may also be a run
directory or a folder of runs; a folder that holds ablations too is read as a folder of ablations. Of an ablation there
is only what its report rests on: the runs of its search are in `trials` alone, and runs that it no longer asks for are
rows of results.csv alone. Calls only read files. They raise UserError, a ValueError, naming what is wrong.

The first columns say which run a row is about: `ablation` (its folder below `folder`), `arm`, `budget`, `seed` and
`run_dir` (below the ablation's folder); a run that serves two budgets is two rows. Of runs without an ablation:
`run_dir` (below `folder`) and `seed`. Integers are Int64 and other numbers float64; what is not known is missing.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lm.ablation.judge.study import Row, Study, read_study
from lm.ablation.outcomes import RESULT
from lm.ablation.record import FILE as RECORD
from lm.config import UserError
from lm.config.identity import flat
from lm.report.metrics import FILE as METRICS
from lm.report.metrics import Lines, read_lines
from lm.runs.find import FoundRun, differing, find_runs, folders_with, without_parts_of_the_head
from lm.runs.query import check_key
from lm.system.terminal import to_override_value

Columns = Mapping[str, type | None]  # None: as the values are
DTYPES = {int: "Int64", float: "float64", bool: "boolean"}
ABLATION: Columns = {"ablation": str, "arm": str}
STATUS = {"finished": "done", "unfinished": "missing", "broken": "failed"}  # of a run: as an ablation says it
SAID: Columns = {"status": str, "error": str}
COUNTS: Columns = {"step": int, "tokens": int, "val/tokens": int}  # of metrics.csv; its other columns are floats
CONTRAST = (  # names of report.json; floats, but for those of the next two tables
    *("baseline", "budget", "primary", "metric", "n_seeds", "mean_difference", "alpha", "ci_low", "ci_high"),
    *("equivalence_margin", "verdict", "by_divergence", "wins", "sd", "tuning_sd", "df", "p", "p_adjusted"),
    *("p_equivalent", "p_equivalent_adjusted", "p_sign_flip", "p_diverged", "p_diverged_adjusted"),
    *("minimum_detectable", "seeds_needed_low", "seeds_needed_high", "sentence"),
)
WORDS = dict.fromkeys(("baseline", "budget", "metric", "verdict", "sentence"), str)
NUMBERS: Columns = {
    **dict.fromkeys(("primary", "by_divergence"), bool),
    **dict.fromkeys(("n_seeds", "wins", "seeds_needed_low", "seeds_needed_high"), int),
}


class Run(NamedTuple):
    who: dict[str, Any]
    found: FoundRun
    lines: Callable[[], Lines]  # of its metrics.csv


def runs(folder: str | Path, settings: Sequence[str] | None = None) -> pd.DataFrame:
    """A row for each reported run, also for one without a result.

    Columns: which run it is; `status` (done, diverged, failed, or missing: not run yet, or running) and `error`; one
    for each of `settings`, dotted keys such as `optim.lr`, by default those that differ between the runs; `val_loss`
    (nats per token), `val_bpb` (bits per byte), `val_top1` (0 to 1), `n_params`, `flops_per_token` (forward and
    backward), `steps` and `tokens` of training, `seconds`, `tokens_per_second`, then hashes, machine and versions.
    """
    every = read_runs(folder)
    found = [one.found for one in every]
    keys = without_parts_of_the_head(differing(found), found) if settings is None else settings
    for key in keys:
        check_key("settings", key, found)
    rows = [
        {key: one.found[key] for key in keys}
        | {key: one.found.result.get(key) for key in RESULT}
        | {"status": STATUS.get(one.found.status, one.found.status), "error": one.found.note}
        | {"torch": one.found.result.get("versions.torch")}
        | one.who
        for one in every
    ]
    first = {**who(every), **SAID}
    return frame(rows, {**first, **{key: None for key in keys if key not in first}, **RESULT, "torch": str})


def curves(folder: str | Path, metric: str = "val/loss") -> pd.DataFrame:
    """A row for each step at which a reported run has logged a finite value of `metric`, in the order of training.

    Columns: which run it is, `step` and `tokens` so far, and the others of metrics.csv: `lr`, `train/loss` (of one
    batch, nats per token), `train/grad_norm`, `val/loss` (nats per token), `val/bpb` (bits per byte), `val/top1` (0 to
    1) and `val/tokens`, how many tokens were scored: a part of the validation text, and in the last row all of it;
    where that is missing, a part throughout. Without the folders of its runs an ablation has its validations only.
    """
    every = read_runs(folder)
    lines = [(one.who, line) for one in every for line in one.lines()]
    names = dict.fromkeys(key for _, line in lines for key in line if key != "run_dir")
    if names and metric not in names:
        raise UserError(f"metric={metric}: is no column of {METRICS}; choose one of {', '.join(names)}")
    rows = [found | of for of, line in lines if metric in (found := numbers(line))]
    return frame(rows, {**who(every), **COUNTS, metric: float, **dict.fromkeys(names, float), **COUNTS})


def trials(folder: str | Path) -> pd.DataFrame:
    """A row for each run of the search of an ablation's arms; none where nothing was tuned.

    Columns: `ablation`, `arm`, `trial` (from 0, in the order in which they were made), `seed`, `run_dir`; a column for
    each hyperparameter; `score`, the mean of the ablation's metric over the seeds of a trial, missing where one
    diverged; `status`, `error` and the results of the run, as in `runs`.
    """
    rows, tried = [], dict[str, type]()
    for name, study in studies(folder, needed=True).items():
        made = iter(study.trials)  # in this order
        for arm, search in study.record.searches.items():
            tried |= dict.fromkeys(search.hyperparameters, float)
            for i, trial in enumerate(search.trials):
                about = {"ablation": name, "arm": arm, "trial": i, "score": trial.score} | trial.values
                for row in (next(made) for _ in search.seeds):
                    said = {"seed": row.seed, "run_dir": row.run_dir, "status": row.status, "error": row.error}
                    rows.append({key: row.result.get(key) for key in RESULT} | about | said)
    first = {**ABLATION, "trial": int, "seed": int, "run_dir": str}
    return frame(rows, {**first, **tried, "score": float, **SAID, **RESULT})


def contrasts(folder: str | Path) -> pd.DataFrame:
    """A row for each comparison of an arm with its baseline, as the ablation's report has it.

    Columns: `ablation`, `arm`, `baseline`, `budget`, `primary`, `metric`; over `n_seeds` pairs and in the metric's unit
    (val_loss: nats per token) `mean_difference`, arm minus baseline, its interval `ci_low` to `ci_high` at the level
    `alpha` (0.05: 95 %; less with planned looks), and the `equivalence_margin`; `verdict`, and whether it rests on how
    often arms diverge; `wins`, the pairs in which the arm is better; `sd` of a difference, `tuning_sd` of the mean,
    `df`; p values, also adjusted for the comparisons of this ablation; the `minimum_detectable` difference;
    `seeds_needed_low` to `seeds_needed_high` where undecided, missing above 100; `sentence`. A verdict that is seen is
    a look. Nothing is written here, so the look is not recorded: write the report too before you add seeds.
    """
    from lm.ablation.report.numbers import contrast  # imports matplotlib

    rows = []
    for name, study in studies(folder, needed=True).items():
        asked = {key: getattr(study.record, key) for key in ("metric", "equivalence_margin")}
        rows += [{"ablation": name} | asked | contrast(study, one) for one in study.contrasts()]
    return frame(rows, {**ABLATION, **dict.fromkeys(CONTRAST, float), **WORDS, **NUMBERS})


def studies(folder: str | Path, needed: bool = False) -> dict[str, Study]:
    """The ablations at or below a folder, by name. Raises UserError if one is `needed` and there is none."""
    top = Path(folder).expanduser()
    places = folders_with([RECORD], top)
    if needed and not places:
        what = f"holds no {RECORD}" if top.is_dir() else "no such folder"
        raise UserError(f"folder={folder}: {what}; expected a folder that holds an ablation")
    return {name: read_study(place) for name, place in places.items()}


def read_runs(folder: str | Path) -> list[Run]:
    if found := studies(folder):
        return [run for name, study in found.items() for run in reported(name, study)]
    return [alone(one) for one in find_runs(Path(folder).expanduser())]


def reported(name: str, study: Study) -> Iterator[Run]:
    for budget in study.record.budgets:
        for row in (one for one in study.rows if budget in one.budgets):
            arm, path = study.record.arms[row.arm], study.outcomes.folder / row.run_dir
            settings = arm.settings | arm.tuned | {"trainer.max_steps": row.steps}
            found = FoundRun(row.run_dir, path, row.status, row.error, settings, flat(dict(row.result)))
            who = {"ablation": name, "arm": row.arm, "budget": budget, "seed": row.seed, "run_dir": row.run_dir}
            yield Run(who, found, partial(lines_of, study, row))


def lines_of(study: Study, row: Row) -> Lines:
    return study.lines(row, METRICS)


def alone(found: FoundRun) -> Run:
    who = {"run_dir": found.name, "seed": found["seed"]}
    return Run(who, found, partial(read_lines, found.path / METRICS))


def who(every: Sequence[Run]) -> Columns:
    return {key: int if key == "seed" else str for one in every[:1] for key in one.who}


def numbers(line: Mapping[str, str]) -> dict[str, float]:
    """What is finite in a row of metrics.csv."""
    found: dict[str, float] = {}
    for key, text in line.items():
        with suppress(ValueError):
            found[key] = int(text) if key in COUNTS else float(text)
    return {key: value for key, value in found.items() if math.isfinite(value)}


def frame(rows: Sequence[Mapping[str, Any]], columns: Columns) -> pd.DataFrame:
    return pd.DataFrame({key: column([row.get(key) for row in rows], kind) for key, kind in columns.items()})


def column(values: list[Any], kind: type | None) -> Any:
    kinds = {type(value) for value in values if value is not None}
    kind = kind or (kinds.pop() if len(kinds) == 1 else float if kinds == {int, float} else str)
    if kind not in DTYPES:
        values = [value if value is None else to_override_value(value) for value in values]
    return pd.Series(values, dtype=DTYPES.get(kind, "string"))
