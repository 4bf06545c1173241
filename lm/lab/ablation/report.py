"""The report of an ablation: report.html, report.md, report.json, results.csv, curves.csv and figures/.

In: the record and the frames of an ablation's folder, at any moment. Out: files. The functions below `write_report` say
what the templates show, in the order of the page; nothing is computed here but means and their intervals.
"""

import json
import math
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from lm.cli.arguments import key_of
from lm.lab.ablation import figures
from lm.lab.ablation.contrasts import percent
from lm.lab.ablation.record import REPORTED, TRIAL, UNUSED, RunFiles, design_of, is_locked
from lm.lab.ablation.results import POINT, SCORES, Results
from lm.lab.ablation.settings import BUDGET_NAMES, METRICS, RUN_METRICS, SEED
from lm.lab.ablation.statistics import interval
from lm.lab.ablation.warnings import CONDITIONS, Weakness, report_warnings, weakening
from lm.lab.report.figures import as_svg, inline
from lm.lab.report.pages import render
from lm.system.files import json_sha256, write_text
from lm.system.terminal import duration, format_table, printable, signed

ALT = {  # what is read aloud in place of a figure
    "forest": "Differences with their confidence intervals",
    "learning": "Learning curves of all arms, and their differences from the baseline",
    "tuning": "Search trials over each hyperparameter",
}
SCHEMA_VERSION = 1  # of report.json
HASHES = ("data_hash", "tokenizer_hash", "source_hash")
PURPOSES = (REPORTED, TRIAL, UNUSED)
WHO = ("arm", "purpose", "seed", "budget", "status", "error")
ROW = (*WHO, *SCORES, "source_hash", "torch", "resumed_from", "run_dir")
WHERE = ("failure", "host", "executor")  # columns of results.csv where they are known
FILES = ("report.html", "report.md", "report.json", "results.csv", "curves.csv")
RECORDED = ("command", "machine", "threads", "workers", "python", "versions")


def write_report(results: Results) -> None:
    """Write the report into the folder of the ablation."""
    folder = results.folder
    is_frozen = results.frozen is not None
    figures_of = (figures.forest, figures.learning, *([] if is_frozen else [figures.tuning]))
    drawn = {draw.__name__: as_svg(draw, results) for draw in figures_of}
    basis, details = (_frozen_basis, _frozen_details) if is_frozen else (_basis, _details)
    context = summary(results, basis(results), report_warnings(results))
    write_pages(folder, drawn, context, details(results), report_json(results))
    if is_frozen:  # its files stay as they were committed
        return
    if len(results.curves) or (folder / "curves.csv").exists():  # a study may be kept without them
        curves = results.curves.drop_duplicates(["run_dir", "step"])[["run_dir", *POINT]]
        write_text(folder / "curves.csv", curves.to_csv(index=False, lineterminator="\n"))
    write_text(folder / "results.csv", results_frame(results).to_csv(index=False, lineterminator="\n"))


def write_pages(
    folder: Path, drawn: Mapping[str, str | None], context: dict[str, Any], details: dict[str, Any], content: Any
) -> None:
    """The pages of a context and its details, with the figures that there are, and the content of report.json."""
    svg = {name: figure for name, figure in drawn.items() if figure is not None}
    page = context | details | {"svg": {name: inline(figure, ALT[name]) for name, figure in svg.items()}}
    (folder / "figures").mkdir(exist_ok=True)
    for name, figure in svg.items():
        write_text(folder / "figures" / f"{name}.svg", figure)
    write_text(folder / "report.md", render("ablation.md.j2", **context))
    write_text(folder / "report.html", render("ablation.html.j2", **page))
    write_text(folder / "report.json", json.dumps(content, indent=1, allow_nan=False) + "\n")


# --- the first screen, which is all of report.md


def summary(results: Results, basis: Iterable[tuple[str, str]], warnings: Sequence[Weakness]) -> dict[str, Any]:
    record, comparisons, alpha = results.record, results.comparisons, results.contrasts[0].alpha
    running = results.counts()["missing"] > 0 or bool(record.untuned())  # arms that are being tuned have no runs yet
    return {
        "title": record.question,
        "running": running,
        "refresh": running and not record.ended and is_locked(results.folder),  # else nobody writes the page again
        "digits": max(row.digits for row in comparisons),
        "unit": results.unit,
        "margin": f"{record.equivalence_margin:g}" if record.equivalence_margin else "",
        "ci": results.ci,
        "answers": [(row.sentence, row.verdict, weakening(row, warnings)) for row in results.asked()],
        "basis": [*basis],
        "warnings": warnings,
        "comparisons": comparisons,
        "has_primary": any(row.primary for row in comparisons),
        "interactions": any(row.family == "interaction" for row in comparisons),
        "inner_ci": percent(1 - 2 * alpha),
        "alpha": f"{alpha:.3g}",
        "looks": ", ".join(map(str, record.looks)),
        "metric_name": METRICS[record.metric][2],
    }


def _basis(results: Results) -> Iterator[tuple[str, str]]:
    """What the answer rests on."""
    record, counts = results.record, results.counts()
    n, total = len(record.seeds), sum(counts.values())
    most = "up to " if n > 1 and counts["done"] < total else ""
    yield "seeds", f"{most}{n} for each arm; {_start(results)}"
    yield from facts_of_metric(results)
    yield "held equal", _held_equal(results)
    if matched := ", ".join(f"{arm} by {key}" for arm, key in record.match_parameters.items()):
        yield "parameters matched", matched
    yield "tuning", _tuned(results)
    noise = [row.tuning_sd for row in results.contrasts]
    if any(noise):
        sizes = " to ".join(dict.fromkeys(f"{sd:.2g}" for sd in (min(filter(None, noise)), max(noise))))
        where = "" if all(noise) else ", where there are enough trials,"
        yield "intervals", f"cover the seeds and{where} the noise of tuning (standard deviation {sizes})"
    else:
        yield "intervals", "cover the seeds only"
    if alone := len(results.rows_alone()):
        yield "runs without a folder", f"for {alone} of {total} runs, results.csv is all that is left"
    if stopped := results.stopped_early():
        yield "planned looks (interim analyses)", stopped


def _held_equal(results: Results) -> str:
    budgets = dict.fromkeys(row.budget for row in results.contrasts)  # of a frozen study there may be several
    return ", and in other runs ".join(f"training {BUDGET_NAMES.get(budget, budget)}" for budget in budgets)


def _frozen_basis(results: Results) -> Iterator[tuple[str, str]]:
    record = results.record
    yield "seeds", f"{len(record.seeds)} for each arm"
    yield from facts_of_metric(results)
    yield "held equal", _held_equal(results)


def _frozen_details(results: Results) -> dict[str, Any]:
    return {"command": _report_command(results), "facts_of_runs": [], "best_arms": ""}


def _report_command(results: Results) -> str:
    return f"python -m lm report {shlex.quote(f'output_dir={os.path.relpath(results.folder)}')}"


def facts_of_metric(results: Results) -> Iterator[tuple[str, str]]:
    better, margin = "lower" if results.lower_is_better else "higher", results.record.equivalence_margin
    yield "metric", f"{METRICS[results.record.metric][2]}; {better} is better"
    words = f"±{margin:g}, the smallest difference that matters"
    yield "equivalence margin", words if margin else "not given, so nothing is called equivalent"


def _start(results: Results) -> str:
    """What a seed sets, and so what the intervals cover."""
    record = results.record
    if any(word.startswith("init_from=") and SEED in word for word in (*record.common, *record.overrides)):
        return (
            "all runs of a seed start from one trained model, that of the seed, so that intervals cover the "
            "differences between such models; a seed also sets the order of the data"
        )
    loaded = {(arm.settings.get("init_from"), arm.settings.get("init_sha256")) for arm in record.arms.values()}
    if len(loaded) == 1 and (start := loaded.pop())[0]:
        return (
            f"all runs start from one given model ({start[0]}, weights {str(start[1])[:16]}): verdicts and intervals "
            "hold for that model alone; a seed sets the order of the data"
        )
    return "a seed sets the initialisation and the order of the data"


def _tuned(results: Results) -> str:
    record = results.record
    if not record.tune.trials:
        return "none: each arm uses the values of its configuration"
    made = results.trials.groupby("arm")["trial"].nunique()
    number = " to ".join(dict.fromkeys(map(str, (made.min(), made.max())))) if len(made) else f"{record.tune.trials}"
    seeds = f"seed{'s' * (len(record.tune.seeds) > 1)} {', '.join(map(str, record.tune.seeds))}"
    return f"each arm separately, in {number} trials on {seeds}; other seeds are reported, on the same text"


# --- the page below its first screen


def _details(results: Results) -> dict[str, Any]:
    record = results.record
    return {
        "best_arms": ", ".join(record.best_arms()),
        "hyperparameters": results.hyperparameters(),
        "arms": [*_arms(results)],
        "common": [*record.common, *record.overrides],
        "final": [*_final(results)],
        "without_result": [*_without_result(results)],
        "command": record.command,
        "report_command": _report_command(results),
        "look_command": f"python -m lm look {shlex.quote(f'folder={os.path.relpath(results.folder)}')}",
        "facts_of_runs": [*_facts(results)],
    }


def _arms(results: Results) -> Iterator[dict[str, Any]]:
    """What is changed in each arm, and of each hyperparameter that is tuned the chosen value and what was tried."""
    for name, arm in results.record.arms.items():
        trials = results.trials[results.trials["arm"] == name].drop_duplicates("trial")
        cells = {
            key: (arm.tuned.get(key), f"{trials[key].min():.4g} to {trials[key].max():.4g}")
            for key in results.hyperparameters(name)
        }
        yield {
            "name": name,
            "arm": arm,
            "overrides": [word for word in arm.overrides if key_of(word) not in arm.tuned],
            "matched_to": results.record.pairs.get(name),
            "offset": results.record.seed_offsets.get(name),
            "cells": [cells.get(key) for key in results.hyperparameters()],
            "trials": len(trials),
            "lost": int(trials["score"].isna().sum()),
            "regret": results.regrets[name].mean if name in results.regrets else None,
        }


def _final(results: Results) -> Iterator[dict[str, Any]]:
    """A row for each arm."""
    for name, arm in results.record.arms.items():
        steps, runs = arm.steps[results.record.budget], results.done_of(name)
        kept = runs[runs["has_folder"].astype(bool)]
        yield {
            "arm": name,
            "scores": [(runs[column].mean(), runs[column].std()) for column in RUN_METRICS],
            "seeds": f"{len(runs)} of {len(results.record.seeds)}",
            "folders": [(seed, f"{quote(run_dir)}/") for seed, run_dir in kept["run_dir"].sort_index().items()],
            "steps": steps,
            "tokens": steps * arm.tokens_per_step,
            "speed": [float(runs[column].astype(float).median()) for column in ("seconds", "tokens_per_second")],
        }


def _without_result(results: Results) -> Iterator[dict[str, Any]]:
    """Runs that have failed, diverged or not finished, and why, or how far they are."""
    reported = results.reported().drop_duplicates("run_dir").assign(purpose="reported")
    runs = pd.concat([reported, results.trials.assign(purpose="search trial")])
    for row in runs[runs["status"] != "done"].to_dict("records"):
        made = f"step {RunFiles(results.folder / row['run_dir']).steps():,}, running, interrupted or not started"
        yield row | {"words": made if row["status"] == "missing" else row["error"]}


def _facts(results: Results) -> Iterator[tuple[str, str]]:
    record, done = results.record, results.done.drop_duplicates("run_dir")
    yield "started, ended", f"{record.begun}, {record.ended or 'not yet'}"
    yield "machine of the last call", f"{record.machine}; runs in parallel: {record.workers}"
    for key, name in (CONDITIONS | {key: key.replace("_", " ") for key in HASHES}).items():
        counts = Counter(done[key].astype("string").fillna("unknown").str[:40])  # of a hash as much as tells it
        values = [value if len(counts) == 1 else f"{value} ({n} of {len(done)} runs)" for value, n in counts.items()]
        yield f"{name} of the runs", ", ".join(values) or "no run is finished yet"
    yield "resumed after an interruption", f"{(done['resumed_from'].fillna('') != '').sum()} of {len(done)}"
    spent = [duration(frame["seconds"].sum()) for frame in (done, results.trials)]
    yield "computing time", f"reported runs {spent[0]}; search trials {spent[1]}"


# --- for the terminal


def result_table(results: Results) -> str:
    """The comparisons, their verdicts in words, what weakens them, and where the report lies."""
    lines = [*(row.sentence for row in results.asked()), *filter(None, [results.stopped_early()])]
    lines += [*map(str, report_warnings(results))]
    reported = results.reported().drop_duplicates("run_dir")
    lost = reported[reported["status"].isin(["failed", "diverged"])]
    lines += [f"{run.status}: {run.run_dir} ({run.error})" for run in lost.itertuples()]
    counts = ", ".join(f"{n} {status}" for status, n in results.counts().items() if n)
    page = results.folder / "report.html"
    lines = [comparison_table(results), "", *lines, "", f"{counts}; {page if page.exists() else results.folder}"]
    return printable("\n".join(lines))


def comparison_table(results: Results) -> str:
    """A line for each comparison."""
    rows = [("arm", "baseline", "seeds", "difference", results.ci, "verdict")]
    for row in results.comparisons:
        numbers = (row.mean_difference, row.ci_low, row.ci_high)
        mean, low, high = ("" if x is None else signed(x, row.digits) for x in numbers)
        ends = f"{low} to {high}" if low else ""
        rows += [(row.arm, row.baseline, str(row.n_seeds), mean, ends, row.verdict)]
    return format_table(rows)


# --- for programs: results.csv, curves.csv and report.json


def results_frame(results: Results) -> pd.DataFrame:
    """A row for each run; what a run does not have is empty. `purpose` says which rows belong together:

    reported: what the verdicts rest on; trial: of the tuning; unused: made for other
    settings, code or seeds than are asked for now, kept so that nothing is lost.
    """
    frame = pd.concat([results.of(purpose).drop_duplicates("run_dir") for purpose in PURPOSES])
    where = [key for key in WHERE if key in frame and frame[key].notna().any()]
    return frame.reindex(columns=[*ROW, *(key for key in results.hyperparameters() if key in frame), *where])


def verdict_json(results: Results, warnings: Sequence[Weakness]) -> dict[str, Any]:
    """What the values alone say."""
    record, contrasts = results.record, results.contrasts
    reported = results.reported().drop_duplicates("run_dir")
    with_error = reported[reported["error"].fillna("") != ""]
    return {
        "schema_version": SCHEMA_VERSION,
        "question": record.question,
        "verdict": [row.sentence for row in results.asked()],
        "contrasts": [row.row() for row in contrasts if row.family != "interaction"],
        "interactions": [
            {"name": row.arm, "formula": row.baseline} | row.row() for row in contrasts if row.family == "interaction"
        ],
        "warnings": [{"summary": weakness.summary, "detail": weakness.detail} for weakness in warnings],
        "arms": [_mean_json(results, name) for name in record.arms],
        "runs": results.counts()
        | {"reasons": with_error[["arm", "seed", "status", "error", "run_dir"]].to_dict("records")},
        **{key: getattr(record, key) or None for key in ("seeds", "metric", "equivalence_margin", "baseline")},
    }


def report_json(results: Results) -> dict[str, Any]:
    """The report in numbers; what is not known is null."""
    record = results.record
    made = {"reported": results.reported().drop_duplicates("run_dir"), "trials": results.trials}
    content = verdict_json(results, report_warnings(results))
    if results.frozen is not None:
        return dict(plain(content))
    content["runs"]["rows"] = len(results.rows_alone())
    content |= {
        "cost": {
            name: {kind: float(runs["seconds"][runs["arm"] == name].sum()) for kind, runs in made.items()}
            for name in record.arms
        },
        "tuning": {name: _search_json(results, name) for name in results.trials["arm"].unique()},
        "hashes": {name: arm.identity for name, arm in record.arms.items()},
        "design": json_sha256(design_of(record)),  # tells a later call which verdict was seen
        "paths": {name: str(results.folder / name) for name in FILES},
    }
    return dict(plain(content | {key: getattr(record, key) for key in RECORDED}))


def _mean_json(results: Results, name: str) -> dict[str, Any]:
    values = results.done_of(name)[results.record.metric].astype(float)
    low, high = interval([*values]) or (None, None)
    statistics = {"n": len(values), "mean": values.mean(), "sd": values.std(), "ci_low": low, "ci_high": high}
    return {"arm": name, "budget": results.record.budget} | statistics


def _search_json(results: Results, name: str) -> dict[str, Any]:
    trials, hyperparameters = results.trials[results.trials["arm"] == name], results.hyperparameters(name)
    columns = ["trial", "search", "seed", "run_dir", *hyperparameters, "score", "status"]
    inside = results.tuned_arms[name].is_interior() if name in results.tuned_arms else {}
    chosen = {"chosen": results.record.arms[name].tuned, "inside": inside}
    return {"hyperparameters": hyperparameters, **chosen, "trials": trials[columns].to_dict("records")}


def plain(value: Any) -> Any:
    """Values as JSON has them: no NaN, no types of numpy and pandas."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if value is pd.NA or value is None or value != value or value in (math.inf, -math.inf) else value
