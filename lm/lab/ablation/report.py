"""The report of an ablation: report.html, report.md, report.json, results.csv, curves.csv and figures/.

`describe` makes one dict of the results. The page, the Markdown and the JSON are views of it.
"""

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

import pandas as pd

from lm.lab.ablation import figures
from lm.lab.ablation.folder import COLUMNS, RunFiles, plain
from lm.lab.ablation.question import BUDGETS, LEARNING_RATE, RUN_METRICS, SEED
from lm.lab.ablation.results import POINT, Results
from lm.lab.ablation.sentence import how_many, margin_in_words, percent
from lm.lab.ablation.warnings import CONDITIONS, report_warnings, weakening
from lm.lab.report.figures import as_svg, inline
from lm.lab.report.pages import render, signed
from lm.system.files import write_text
from lm.system.terminal import duration, format_table, printable

SCHEMA_VERSION = 3  # of report.json
ALT = {  # what is read aloud in place of a figure
    "forest": "Differences with their confidence intervals",
    "learning": "Learning curves of all arms, and their differences from the baseline",
    "ladder": "Differences from the score of the baseline over the tuned setting",
}
FIGURES = (figures.forest, figures.learning, figures.ladder)
HASHES = ("data_hash", "tokenizer_hash", "source_hash")
RECORDED = ("changed", "command", "machine", "threads", "workers")


def write_report(results: Results, is_refreshed: bool = False) -> None:
    """Write the pages, the figures and the tables of an ablation, of a frozen study or of rows into their folder.

    `is_refreshed`: whether a browser loads the page again now and then, because the caller will write it again.
    """
    folder, content = results.folder, describe(results)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "report.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_text(folder / "report.md", render("ablation.md.j2", **content, comparisons=results.comparisons))
    write_text(folder / "report.html", _html(results, content | {"is_refreshed": is_refreshed}))
    if results.record.begun:  # else rows, or a study whose files stay as they were committed
        write_tables(results)


def write_tables(results: Results) -> None:
    """Write results.csv and curves.csv, which stand for runs whose folders are gone."""
    folder = results.folder
    if len(results.curves) or (folder / "curves.csv").exists():  # a study may be kept without them
        curves = results.curves.drop_duplicates(["run_dir", "step"])[["run_dir", *POINT]]
        write_text(folder / "curves.csv", curves.to_csv(index=False, lineterminator="\n"))
    columns = [key for key in COLUMNS if key in results.runs]
    write_text(folder / "results.csv", results.runs[columns].to_csv(index=False, lineterminator="\n"))


def _html(results: Results, content: dict[str, Any]) -> str:
    svg = {}
    for draw in FIGURES if results.question.metric in RUN_METRICS else FIGURES[:1]:
        if figure := as_svg(draw, results):
            svg[draw.__name__] = inline(figure, ALT[draw.__name__])
    title, comparisons = content["question"], results.comparisons
    return render("ablation.html.j2", **content, title=title, comparisons=comparisons, svg=svg)


def describe(results: Results) -> dict[str, Any]:
    """Return the content of report.json: what is not known is None or empty."""
    question, record, counts = results.question, results.record, results.counts()
    warnings = report_warnings(results)
    without = results.asked_for[results.asked_for["status"] != "done"]
    content = {
        "schema_version": SCHEMA_VERSION,
        "question": question.question,
        "answers": [
            {"verdict": row.verdict, "sentence": row.sentence, "weakened": weakening(row, warnings)}
            for row in results.answers()
        ],
        "contrasts": [asdict(row) for row in results.contrasts],
        "warnings": [{"summary": weakness.summary, "detail": weakness.detail} for weakness in warnings],
        "basis": dict(_basis(results)),
        "is_unfinished": counts["missing"] > 0 or bool(results.untuned()),
        **{key: getattr(question, key) for key in ("seeds", "baseline", "metric", "equivalence_margin", "looks")},
        "unit": results.metric.unit,
        "metric_name": results.metric.words,
        "ci": results.ci,
        "inner_ci": percent(1 - 2 * results.contrasts[0].alpha),
        "alpha": results.contrasts[0].alpha,
        "digits": max(row.digits for row in results.contrasts),
        "has_folds": question.folds,
        "arms": [_arm(results, name) for name in record.arms],
        "common": record.common(),
        "runs": counts,
        "without_result": [*_without_result(results, without)],
        "facts_of_runs": dict(_facts(results)),
        "commands": _commands(results),
        **{key: getattr(record, key) for key in RECORDED},
    }
    return dict(plain(content))


def _basis(results: Results) -> Iterator[tuple[str, str]]:
    """Yield what the answer rests on."""
    question = results.question
    if question.metric in RUN_METRICS and results.frozen is None:
        yield "seeds", f"{results.n_seeds} for each arm; {_start(results)}"
        yield "validation text", _scored(results)
    else:
        pairs = [row.n_seeds for row in results.contrasts]
        yield "seeds", f"{' to '.join(dict.fromkeys((str(min(pairs)), str(max(pairs)))))} for each comparison"
    better = "lower" if results.metric.sign > 0 else "higher"
    yield "metric", f"{results.metric.words}; {better} is better"
    margin = question.equivalence_margin
    if margin is None:
        yield "equivalence margin", "not given, so nothing is called equivalent"
    else:
        words = f" ({margin_in_words(question.metric, margin)})" if question.metric == "val_loss" else ""
        yield "equivalence margin", f"±{margin:g} {results.metric.unit}{words}, the smallest difference that matters"
    if question.metric not in RUN_METRICS:
        return
    budgets = dict.fromkeys(row.budget for row in results.contrasts)  # of a frozen study there may be several
    equal = ", and in other runs ".join(f"training {BUDGETS.get(budget, budget)}" for budget in budgets)
    yield "held equal in all arms", equal
    if results.frozen is not None:
        return
    if matched := ", ".join(f"{arm} by {key}" for arm, key in question.match_parameters.items()):
        yield "parameters matched", matched
    yield "tuning", _tuning(results)
    changed = results.record.changed_after()
    when = f"changed after {changed} results" if changed else "not changed after the first result"
    yield "design (question, settings and texts)", when
    if stopped := results.stopped_early():
        yield "planned looks (interim analyses)", stopped


def _start(results: Results) -> str:
    """Return what a seed sets, and so what the intervals count."""
    record = results.record
    loaded = [name for name, arm in record.arms.items() if arm.settings.get("init_from")]
    if not loaded:
        return "a seed sets the initialisation and the order of the data"
    who = "all runs continue" if len(loaded) == len(record.arms) else f"the runs of {', '.join(loaded)} continue"
    paths = (str(record.arms[name].settings["init_from"]) for name in loaded)
    given = dict.fromkeys(path for path in paths if SEED not in path)
    if not given:
        return f"{who} the trained model of their seed; a seed also sets the order of the data"
    models = f"a given model ({', '.join(given)}), so verdicts hold for that model alone"
    return f"{who} {models}; a seed sets the order of the data"


def _scored(results: Results) -> str:
    """Return on how many tokens a run is scored, and whether pairs have texts of their own."""
    tokens = results.record.arms[results.question.baseline].scored_tokens
    if not tokens:
        return "not known"
    if not results.question.folds:
        return f"{tokens[0]:,} tokens, the same for all pairs. The intervals cover the variation between seeds alone"
    tokens = tokens[: results.n_seeds]  # a planned look may have decided with fewer
    each = " to ".join(dict.fromkeys(f"{n:,}" for n in (min(tokens), max(tokens))))
    whole = f"each pair is scored on its own part of the text ({each} tokens, {sum(tokens):,} in all)"
    return f"{whole}. The intervals cover the variation between seeds and between texts"


def _tuning(results: Results) -> str:
    tune = results.question.tune
    if tune is None:
        return "none. Each arm uses the learning rates of its configuration"
    what = "learning rate (one factor multiplies all, so their ratios stay the same)"
    what = what if tune == LEARNING_RATE else tune
    tried = how_many(ladder.n_tried for ladder in results.ladders.values())
    return f"each tuned arm at its own best {what}, from {tried} values. All other settings are as configured"


def _arm(results: Results, name: str) -> dict[str, Any]:
    record, question = results.record.arms[name], results.question
    runs = results.reported[results.reported["arm"] == name]
    shown = results.shown_runs()
    shown = shown[shown["arm"] == name].set_index("seed").sort_index()
    scores = (
        {} if question.folds else {key: (shown[key].mean(), shown[key].std()) for key in RUN_METRICS if key in shown}
    )
    return {
        "name": name,
        **{key: getattr(record, key) for key in ("overrides", "matched", "n_params", "flops_per_token", "steps")},
        "baseline": question.pairs().get(name),
        "seed_offset": question.seed_offsets.get(name),
        "tokens": record.steps * record.tokens_per_step,
        "scored_tokens": record.scored_tokens,
        "n_seeds": len(shown),
        "scores": scores,  # metric -> mean and standard deviation; of different texts there is no mean
        "folders": {
            str(seed): f"{quote(run_dir)}/"
            for seed, run_dir in shown["run_dir"].items()
            if record.identity and (results.folder / run_dir).is_dir()
        },
        **{key: runs[key].astype(float).median() for key in ("seconds", "tokens_per_second") if key in runs},
        "ladder": _ladder(results, name) if name in results.ladders else None,
        "identity": record.identity,
    }


def _ladder(results: Results, name: str) -> dict[str, Any]:
    ladder = results.ladders[name]
    return {
        "factors": [float(factor) for factor in ladder.losses.columns],
        "mean_differences": [*results.ladder_differences(name).mean()],  # from the score of the baseline
        **{key: getattr(ladder, key) for key in ("best", "dropped", "gain", "end", "p_equal")},
    }


def _without_result(results: Results, runs: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield runs that have failed, diverged or not finished, and why, or how far they are."""
    for row in runs[["arm", "seed", "factor", "status", "error", "run_dir"]].to_dict("records"):
        if row["status"] == "missing":
            steps = RunFiles(results.folder / row["run_dir"]).steps()
            row["error"] = f"step {steps:,}, running, interrupted or not started"
        yield row


def _facts(results: Results) -> Iterator[tuple[str, str]]:
    record, done = results.record, results.asked_for[results.asked_for["status"] == "done"]
    if not record.begun:
        return
    yield "started", record.begun
    yield "machine of the last call", f"{record.machine}; runs in parallel: {record.workers}"
    for key, name in (CONDITIONS | {key: key.replace("_", " ") for key in HASHES}).items():
        counts = Counter(done[key].astype("string").fillna("unknown").str[:40])  # of a hash as much as tells it
        if len(counts) > 3:  # of texts of different folds
            yield f"{name} of the runs", f"{len(counts)} different ones"
            continue
        values = [value if len(counts) == 1 else f"{value} ({n} of {len(done)} runs)" for value, n in counts.items()]
        yield f"{name} of the runs", ", ".join(values) or "no run is finished yet"
    yield "resumed after an interruption", f"{(done['resumed_from'].fillna('') != '').sum()} of {len(done)}"
    yield "computing time", f"{duration(done['seconds'].sum())} in {len(done)} runs"


def _commands(results: Results) -> list[str]:
    if results.question.metric not in RUN_METRICS:
        return [results.record.command]
    folder = os.path.relpath(results.folder)
    shown = [f"python -m lm report {shlex.quote(f'output_dir={folder}')}"]
    if results.frozen is None:
        shown = [results.record.command, *shown, f"python -m lm look {shlex.quote(f'folder={folder}')}"]
    return shown


# --- for the terminal


def result_table(results: Results) -> str:
    """Return the comparisons, their verdicts in words, what weakens them, and where the report lies."""
    warnings = report_warnings(results)
    lines = [comparison_table(results), ""]
    answers = results.answers()
    of_some = [weakness for weakness in warnings if weakness.about]  # the other warnings hold for all comparisons
    for row in answers:
        lines += [row.sentence, *(f"  {words}" for words in weakening(row, of_some) if len(answers) > 1)]
    if results.record.arms[results.question.baseline].scored_tokens:
        lines += [f"validation text: {_scored(results)}."]
    lines += [*filter(None, [results.stopped_early()]), *map(str, warnings)]
    lost = results.asked_for[results.asked_for["status"].isin(["failed", "killed", "diverged"])]
    for run in lost.itertuples():
        log = results.folder / f"{run.run_dir}.log"
        see = f", see {log}" if results.record.begun and log.exists() else ""  # rows of any program have no folders
        lines.append(f"{run.status}: {run.run_dir} ({run.error}){see}")
    counts = ", ".join(f"{n} {status}" for status, n in results.counts().items() if n)
    page = results.folder / "report.html"
    ends = [f"runs: {counts}", *([f"report: {page}"] if page.exists() else [])]
    return printable("\n".join([*lines, "", *ends]))


def comparison_table(results: Results) -> str:
    """Return a line for each comparison."""
    rows = [("arm", "baseline", "seeds", f"difference, {results.metric.unit}", results.ci, "verdict")]
    for row in results.comparisons:
        numbers = (row.mean_difference, row.ci_low, row.ci_high)
        mean, low, high = ("" if x is None else signed(x, row.digits) for x in numbers)
        ends = f"{low} to {high}" if low else ""
        rows += [(row.arm, row.baseline, str(row.n_seeds), mean, ends, row.verdict)]
    return format_table(rows)
