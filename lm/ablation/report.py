"""The report of an ablation: report.html, report.md, report.json, results.csv, curves.csv and figures/.

In: the record and the frames of an ablation's folder, at any moment. Out: files; nothing is computed here but means.
"""

import json
import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pandas as pd

from lm.ablation import figures
from lm.ablation.contrasts import decimals, percent
from lm.ablation.record import AblationRecord
from lm.ablation.results import POINT, SCORES, Results
from lm.ablation.statistics import interval
from lm.ablation.views import (
    METRIC_NAMES,
    asked,
    ci,
    curve_column,
    curve_table,
    curves_shown,
    finished,
    lower_is_better,
    merged,
    over_seeds,
    rows_alone,
    run_counts,
    seeds_with,
    sentences,
    stopped_early,
    unit,
    weights,
)
from lm.ablation.warnings import CONDITIONS, Warning, made_with, report_warnings, time_ratios
from lm.config.ablation import BUDGET_NAMES
from lm.report.figures import inline
from lm.report.pages import render
from lm.system.files import write_text
from lm.system.terminal import duration

SCHEMA_VERSION = 1  # of report.json
REFRESH = 30  # seconds between two readings of the page of a running ablation
ROW = (
    "arm",
    "purpose",
    "seed",
    "budgets",
    "status",
    "error",
    *SCORES,
    "source_hash",
    "torch",
    "resumed_from",
    "run_dir",
)
WHERE = ("failure", "host", "executor")  # columns of results.csv where they are known
HELD_EQUAL = {
    "tokens": "training tokens",
    "flops": "training FLOPs (within 2 %)",
    "time": "training time (planned from steps of each arm measured in turns; the ratios reached are among the arms)",
}
FILES = ("report.html", "report.md", "report.json", "results.csv", "curves.csv")
RECORDED = (
    *("command", "machine", "threads", "workers", "python", "versions"),
    *("seeds", "metric", "equivalence_margin", "baseline"),
)


def write_report(results: Results) -> None:
    """Write the report into the folder of the ablation."""
    folder = results.folder
    warnings = report_warnings(results)
    drawn = draw(results)
    (folder / "figures").mkdir(exist_ok=True)
    for name, svg in drawn.items():
        write_text(folder / "figures" / f"{name}.svg", svg)
    context = summary(results, warnings)
    write_text(folder / "report.md", render("ablation.md.j2", **context))
    write_text(folder / "report.html", render("ablation.html.j2", **context, **details(results, drawn)))
    write_text(folder / "report.json", json.dumps(report_json(results, warnings), indent=1, allow_nan=False) + "\n")
    write_text(folder / "curves.csv", curves_csv(results))
    write_text(folder / "results.csv", results_frame(results).to_csv(index=False, lineterminator="\n"))


def draw(results: Results) -> dict[str, str]:
    """The figures for which there is something to show, by name, as SVG."""
    record, curves, diagnostics = results.record, curves_shown(results), _diagnostics(results)
    drawn = {}
    if results.contrasts["mean_difference"].notna().any():
        drawn["forest"] = figures.forest(results)
    if run_counts(results)["done"]:
        drawn["seeds"] = figures.seeds(results)
    if any(len(over_seeds(curve_table(curves, arm, curve_column(results)))) > 1 for arm in record.arms):
        drawn["learning"] = figures.learning(results, curves)
    if any(map(results.hyperparameters, record.arms)) and len(results.trials):
        drawn["tuning"] = figures.tuning(results)
    if figures.setting_series(results):
        drawn["setting"] = figures.over_setting(results)
    if len(diagnostics):
        drawn["gradients"] = figures.gradients(results, diagnostics)
        if tables := _bands(results, diagnostics):
            drawn["bands"] = figures.bands(results, tables)
    return drawn


def _diagnostics(results: Results) -> pd.DataFrame:
    """The diagnostics of the finished runs under the first budget; empty if they have none."""
    budget, frames = results.record.budgets[0], []
    for arm in results.record.arms:
        for seed, run in finished(results, arm, budget).iterrows():
            frame = results.diagnostics(run["run_dir"])
            about = {"arm": arm, "budget": budget, "seed": seed, "run_dir": run["run_dir"], "purpose": "reported"}
            frames += [frame.assign(**about)] if len(frame) else []
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _bands(results: Results, diagnostics: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Empty where tokenizers differ: the same band then holds other tokens in each arm."""
    if len({arm.identity["tokenizer_hash"] for arm in results.record.arms.values()}) > 1:
        return {}
    pairs = results.record.contrasts.items()
    tables = {arm: figures.band_differences(diagnostics, arm, baseline) for arm, baseline in pairs}
    return {arm: table for arm, table in tables.items() if len(table)}


def summary(results: Results, warnings: list[Warning]) -> dict[str, Any]:
    """What report.md and the first screen of report.html show."""
    record, counts = results.record, run_counts(results)
    contrasts = merged(results, results.contrasts)
    rows = [_comparison(results, contrast) for _, contrast in contrasts.iterrows()]
    return {
        "title": record.question,
        "refresh": REFRESH if counts["missing"] else None,
        "running": bool(counts["missing"]),
        "digits": decimals(record.equivalence_margin),
        "unit": unit(results),
        "margin": f"{record.equivalence_margin:g}",
        "ci": ci(results.contrasts),
        "several_budgets": len(record.budgets) > 1,
        "answers": _answers(results),
        "basis": list(_basis(results)),
        "warnings": warnings,
        "comparisons": [row for row in rows if row["family"] != "interaction"],
        "interactions": [row for row in rows if row["family"] == "interaction"],
        "with_regret": any(pd.notna(row["regret"]) for row in rows),
        "lower_is_better": lower_is_better(results),
    }


def _answers(results: Results) -> list[dict[str, str]]:
    """The verdicts in words, each with what tuning leaves open of its mean."""
    digits, answers = decimals(results.record.equivalence_margin), []
    contrasts = merged(results, asked(results.contrasts))
    for (_, contrast), sentence in zip(contrasts.iterrows(), sentences(results), strict=True):
        verdict, colon, rest = sentence.partition(":")
        regret = ""
        if pd.notna(contrast["mean_without_regret"]):
            regret = (
                f"{contrast['arm']} may be {contrast['regret']:.{digits}f} from its best, {contrast['baseline']} "
                f"{contrast['baseline_regret']:.{digits}f} (expected regret of tuning); without that the difference "
                f"is {contrast['mean_without_regret']:+z.{digits}f}."
            )
        answers.append(
            {"verdict": verdict + colon, "rest": rest.strip(), "regret": regret, "kind": contrast["verdict"]}
        )
    return answers


def _comparison(results: Results, contrast: pd.Series) -> dict[str, Any]:
    """A row of the tables of comparisons."""
    budget, arms = contrast["budget"], weights(contrast)
    diverged = {arm: len(seeds_with(results, arm, budget, "diverged")) for arm in arms}
    return contrast.to_dict() | {
        "budget": " and ".join(contrast["budgets"]),
        "bold": contrast["family"] == "primary",
        "diverged": {arm: f"{n} of {_ended(results, arm, budget)}" for arm, n in diverged.items()},
        "any_diverged": any(diverged.values()),
    }


def _ended(results: Results, arm: str, budget: str) -> int:
    """How many runs came to an end, finished or diverged."""
    return len(seeds_with(results, arm, budget, "done")) + len(seeds_with(results, arm, budget, "diverged"))


def _basis(results: Results) -> Iterator[tuple[str, str]]:
    """What the answer rests on."""
    record, counts = results.record, run_counts(results)
    n, total = len(record.seeds), sum(counts.values())
    most = "up to " if n > 1 and counts["done"] < total else ""
    yield "seeds", f"{most}{n} for each arm; {_start(record)}"
    better = "lower" if lower_is_better(results) else "higher"
    yield "metric", f"{METRIC_NAMES[record.metric]}; {better} is better"
    yield "equivalence margin", f"±{record.equivalence_margin:g}, the smallest difference that matters"
    yield "held equal", ", and in other runs ".join(HELD_EQUAL[budget] for budget in record.budgets)
    if matched := ", ".join(f"{arm} by {key}" for arm, key in record.match_parameters.items()):
        yield "parameters matched", matched
    yield "tuning", _tuned(results)
    yield "intervals", _counted(results)
    if others := _other_verdicts(results):
        yield "other comparisons", others
    if alone := len(rows_alone(results)):
        yield "runs without a folder", f"for {alone} of {total} runs, results.csv is all that is left"
    if stopped := stopped_early(results):
        yield "planned looks", stopped


def _start(record: AblationRecord) -> str:
    """What a seed sets, and so what the intervals cover."""
    if record.base is not None:
        losses = [one.val_loss for one in record.bases if one.seed in record.seeds and one.val_loss is not None]
        reached = f", with a mean validation loss of {sum(losses) / len(losses):.4f}" if losses else ""
        return (
            f"all runs of a seed start from one trained model ({' '.join(record.base)}{reached}), which has the same "
            "seed, so that intervals cover the differences between such models; a seed also sets the order of the data"
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
    under = f" at equal {BUDGET_NAMES[record.budgets[0]]}" * (len(record.budgets) > 1)
    seeds = f"seed{'s' * (len(record.tune.seeds) > 1)} {', '.join(map(str, record.tune.seeds))}"
    return f"each arm separately{under}, in {number} trials on {seeds}; other seeds are reported, on the same text"


def _counted(results: Results) -> str:
    """What the intervals, and so the verdicts, cover."""
    noise = results.contrasts["tuning_sd"].fillna(0.0)
    if not noise.any():
        return "count the seeds only"
    sizes = " to ".join(dict.fromkeys(f"{sd:.2g}" for sd in (noise[noise > 0].min(), noise.max())))
    most = "" if noise.all() else ", where there are enough trials,"
    return f"count the seeds and{most} that each arm's settings may not be its best (standard deviation {sizes})"


def _other_verdicts(results: Results) -> str:
    """What is decided about the comparisons that are not primary, under the first budget."""
    first = results.contrasts["budget"] == results.record.budgets[0]
    others = results.contrasts[first & ~results.contrasts.index.isin(asked(results.contrasts).index)]
    digits, words = decimals(results.record.equivalence_margin), []
    for _, contrast in others[others["verdict"] != "undecided"].iterrows():
        reason = "by divergence" if contrast["by_divergence"] else f"{contrast['mean_difference']:+z.{digits}f}"
        than = "to" if contrast["verdict"] == "equivalent" else "than"
        words.append(f"{contrast['arm']} is {contrast['verdict']} {than} {contrast['baseline']} ({reason})")
    return "; ".join(words)


def details(results: Results, drawn: dict[str, str]) -> dict[str, Any]:
    """What report.html shows below its first screen."""
    record = results.record
    diagnostics = _diagnostics(results)
    shown = results.contrasts[results.contrasts["mean_difference"].notna()]
    alt = "; ".join(f"{row['arm']} against {row['baseline']}: {row['verdict']}" for _, row in shown.iterrows())
    return {
        "svg": {name: inline(svg, alt if name == "forest" else name) for name, svg in drawn.items()},
        "sign_flip": results.contrasts["p_sign_flip"].notna().any(),
        "inner_ci": percent(1 - 2 * results.contrasts["alpha"].iloc[0]),
        "alpha": f"{results.contrasts['alpha'].iloc[0]:.3g}",
        "looks": ", ".join(map(str, record.looks)),
        "metric_name": METRIC_NAMES[record.metric],
        "curve_coverage": _curve_coverage(results),
        "no_curves": _no_curves(results) if "learning" not in drawn else "",
        "arms": [_arm(results, name) for name in record.arms],
        "common": [*record.common, *record.overrides],
        "reached": list(_reached(results)),
        "ratios": list(_ratios(results)),
        "warm_up": _warm_up(record),
        "tuning": list(_tuning_rows(results)),
        "plot_over": record.plot_over,
        "diagnostics": [_norms(diagnostics, arm) for arm in record.arms] if len(diagnostics) else [],
        "bands": _bands(results, diagnostics) if len(diagnostics) else {},
        "samples": _samples(results),
        **_without_result(results),
        **_reproduction(results),
    }


def _curve_coverage(results: Results) -> str:
    """Which part of the validation text the points of the curves were scored on."""
    curves = curves_shown(results)
    scored = curves.groupby("run_dir")["val/tokens"].agg(["first", "last", "size"])
    scored = scored[(scored["size"] > 1) & scored["first"].notna()]
    if scored.empty:
        return ""
    run_dir = scored.index[0]
    arm = curves[curves["run_dir"] == run_dir]["arm"].iloc[0]
    first, last, whole = (
        scored.loc[run_dir, "first"],
        scored.loc[run_dir, "last"],
        results.record.arms[arm].val_tokens - 1,
    )
    if first == whole:
        return "Every point is a score of the whole validation text."
    estimates = f"Points are estimates on {first:,} of {whole:,} tokens of the validation text"
    if last == whole:
        return f"{estimates}; the last one is the score of the whole text, as in the tables."
    return f"{estimates}, also after the last step: curves do not end at the score of the whole text, as in the tables."


def _no_curves(results: Results) -> str:
    """Why there are none, if runs were too short to have some."""
    arm, budget = results.record.arms[results.record.baseline], results.record.budgets[0]
    steps, every = arm.steps[budget], arm.settings.get("validation.every") or 0
    if not run_counts(results)["done"] or 0 < 2 * every <= steps:
        return ""
    return (
        f"There are no learning curves: runs of {steps:,} steps with validation.every={every} are not validated twice "
        f"during training. Set validation.every={max(1, steps // 10)} to record them."
    )


def _arm(results: Results, name: str) -> dict[str, Any]:
    """What is changed in an arm and what it costs."""
    record, arm = results.record, results.record.arms[name]
    reported = results.runs[(results.runs["purpose"] == "reported") & (results.runs["arm"] == name)]
    spent = reported.drop_duplicates("run_dir")["seconds"].sum()
    return {
        "name": name,
        "overrides": arm.overrides,
        "matched": [f"{key}={value}" for key, value in arm.matched.items()],
        "matched_to": record.contrasts.get(name),
        "tuned": [f"{key}={value:g}" for key, value in arm.tuned.items()],
        "offset": record.seed_offsets.get(name),
        "n_params": arm.n_params,
        "flops_per_token": arm.flops_per_token,
        "time": duration(spent),
        "trial_time": duration(results.trials[results.trials["arm"] == name]["seconds"].sum()),
    }


def _reached(results: Results) -> Iterator[dict[str, Any]]:
    """A row for each arm and budget, those of the same runs once."""
    record, digits = results.record, decimals(results.record.equivalence_margin)
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for budget in record.budgets:
        for name, arm in record.arms.items():
            runs = finished(results, name, budget)
            key = (name, *runs["run_dir"]) if len(runs) else (name, budget)
            if key in rows:
                rows[key]["budget"] += f" and {BUDGET_NAMES[budget]}"
                continue
            rows[key] = {
                "arm": name,
                "budget": BUDGET_NAMES[budget],
                "scores": [_mean_sd(runs[column], digits) for column in METRIC_NAMES],
                "seeds": f"{len(runs)} of {len(record.seeds)}",
                "steps": arm.steps[budget],
                "tokens": arm.steps[budget] * arm.tokens_per_step,
                "seconds": runs["seconds"].median() if len(runs) else None,
                "tokens_per_second": runs["tokens_per_second"].median() if len(runs) else None,
            }
    yield from rows.values()


def _mean_sd(values: pd.Series, digits: int) -> str:
    if values.empty:
        return "-"
    return f"{values.mean():.{digits}f}" + (f"\u00a0±\u00a0{values.std():.{digits}f}" if len(values) > 1 else "")


def _ratios(results: Results) -> Iterator[dict[str, Any]]:
    """Each arm divided by its baseline: how near they come to what is held equal."""
    record = results.record
    comparisons = merged(results, results.contrasts[results.contrasts["family"] != "interaction"])
    for _, contrast in comparisons.iterrows():
        arm, baseline = record.arms[contrast["arm"]], record.arms[contrast["baseline"]]
        tokens = [side.steps[contrast["budget"]] * side.tokens_per_step for side in (arm, baseline)]
        flops = [n * side.flops_per_token for n, side in zip(tokens, (arm, baseline), strict=True)]
        measured = time_ratios(results, contrast["arm"], contrast["baseline"], contrast["budget"])
        yield {
            "arm": contrast["arm"],
            "baseline": contrast["baseline"],
            "budget": " and ".join(contrast["budgets"]),
            "planned": [a / b if b else None for a, b in ((arm.n_params, baseline.n_params), tokens, flops)],
            "time": measured.median() if len(measured) else None,
        }


def _warm_up(record: AblationRecord) -> str:
    """Where runs differ in length and the warm-up does not."""
    steps = sorted({arm.steps[budget] for arm in record.arms.values() for budget in record.budgets})
    warm_ups = {arm.settings.get("optim.warmup_steps") for arm in record.arms.values()} - {None, 0}
    if len(steps) < 2 or not warm_ups:
        return ""
    values = " or ".join(f"optim.warmup_steps={value}" for value in sorted(map(str, warm_ups)))
    return f"The warm-up is a fixed number of steps, {values}, in runs of {steps[0]:,} to {steps[-1]:,} steps."


def _tuning_rows(results: Results) -> Iterator[dict[str, Any]]:
    record = results.record
    where = {True: "inside", False: "at the edge", None: "not varied"}
    for arm in record.arms if record.tune.trials else ():
        trials = results.trials[results.trials["arm"] == arm].drop_duplicates("trial")
        tuned = results.tuned_arms.get(arm)
        for key in results.hyperparameters(arm):
            values = trials[key].astype(float)
            yield {
                "arm": arm,
                "key": key,
                "chosen": record.arms[arm].tuned.get(key),
                "position": where[tuned.is_interior()[key]] if tuned else "",
                "range": f"{values.min():g} to {values.max():g}",
                "first": values.iloc[0],
                "trials": len(trials),
                "without_result": int(trials["score"].isna().sum()),
            }


def _norms(diagnostics: pd.DataFrame, arm: str) -> dict[str, Any]:
    """Row norms at the end of training, and the share of clipped steps: means over seeds."""

    def last(column: str) -> float | None:
        table = curve_table(diagnostics, arm, column) if column in diagnostics else pd.DataFrame()
        return None if table.empty else float(table.ffill().iloc[-1].mean())

    clip = curve_table(diagnostics, arm, "clip_rate")
    matrices = {"embedding": "embedding_norm", "LM head": "head_norm"}
    norms = {name: [last(f"{key}/{band}") for band in figures.BANDS] for name, key in matrices.items()}
    return {"arm": arm, "norms": norms, "clipped": None if clip.empty else 100 * clip.mean().mean()}


def _samples(results: Results) -> dict[str, Any]:
    """Continuations of the first seed that all arms have finished, of those for which the most have their folder."""
    record, budget = results.record, results.record.budgets[0]
    run_dirs = {arm: finished(results, arm, budget)["run_dir"] for arm in record.arms}
    seeds = [seed for seed in record.seeds if all(seed in runs.index for runs in run_dirs.values())]
    lost = set(rows_alone(results)["run_dir"])
    if not seeds:
        return {"seed": None, "prompts": [], "lost": ""}
    seed = min(seeds, key=lambda seed: sum(runs[seed] in lost for runs in run_dirs.values()))
    texts = {
        arm: {pair["prompt"]: pair["continuation"] for pair in results.samples(runs[seed])}
        for arm, runs in run_dirs.items()
    }
    asked_for = [arm for arm, one in record.arms.items() if one.settings.get("prompts") != []]
    prompts = dict.fromkeys(prompt for by_prompt in texts.values() for prompt in by_prompt)
    return {
        "seed": seed,
        "prompts": [{"text": prompt, "arms": [*_continuations(record, texts, prompt)]} for prompt in prompts],
        "lost": ", ".join(arm for arm in asked_for if run_dirs[arm][seed] in lost),
    }


def _continuations(record: AblationRecord, texts: dict[str, dict[str, str]], prompt: str) -> Iterator[dict[str, Any]]:
    """What each arm makes of a prompt, divided where it first differs from its baseline's."""
    for arm in (arm for arm in texts if prompt in texts[arm]):
        text, baseline = texts[arm][prompt], record.contrasts.get(arm)
        other = texts.get(baseline or "", {}).get(prompt)
        alike = len([*takewhile(lambda pair: pair[0] == pair[1], zip(text, other or "", strict=False))])
        same = text == other
        yield {"arm": arm, "baseline": baseline if other is not None else None, "same": same} | {
            "alike": text[:alike],
            "rest": text[alike:],
        }


def _without_result(results: Results) -> dict[str, Any]:
    reported = results.runs[results.runs["purpose"] == "reported"]
    budgets = reported.groupby("run_dir")["budget"].agg(lambda names: " and ".join(BUDGET_NAMES[one] for one in names))
    runs = reported.drop_duplicates("run_dir").assign(purpose=lambda frame: "equal " + frame["run_dir"].map(budgets))
    runs = pd.concat([runs, results.trials.assign(purpose="search trial")])
    missing = runs[runs["status"] == "missing"]
    return {
        "broken": runs[runs["status"].isin(["failed", "diverged"])].to_dict("records"),
        "missing": [
            row | {"made": results.reader.steps(row["run_dir"]), "planned": _planned_steps(results, row)}
            for row in missing.to_dict("records")
        ],
    }


def _planned_steps(results: Results, run: dict[str, Any]) -> int:
    steps = results.record.arms[run["arm"]].steps
    return steps[run["budget"]] if run.get("budget") in steps else steps[results.record.budgets[0]]


def _reproduction(results: Results) -> dict[str, Any]:
    record = results.record
    report = re.sub(r"ablate(\.py)?\b.*", r"report\1", record.command, flags=re.DOTALL)
    done = results.runs[(results.runs["purpose"] == "reported") & (results.runs["status"] == "done")]
    done = done.drop_duplicates("run_dir")
    return {
        "command": record.command,
        "report_command": f"{report} {shlex.quote(f'output_dir={_relative(results.folder)}')}",
        "facts_of_runs": [*_facts(results, done)],
    }


def _facts(results: Results, done: pd.DataFrame) -> Iterator[tuple[str, str]]:
    record = results.record
    yield "started, ended", f"{record.begun}, {record.ended or 'not yet'}"
    yield "machine of the last call", f"{record.machine}; runs in parallel: {record.workers}"
    for key, counts in made_with(results).items():
        values = [value if len(counts) == 1 else f"{value} ({n} of {len(done)} runs)" for value, n in counts.items()]
        yield f"{CONDITIONS[key]} of the runs", ", ".join(values) or "no run is finished yet"
    trials = f"; trials {', '.join(map(str, record.tune.seeds))}" if record.tune.trials else ""
    yield "seeds", f"{', '.join(map(str, record.seeds))}{trials}"
    for base in record.bases:
        if base.val_loss is not None:
            weights_hash = (base.sha256 or "")[:16]
            yield f"base of seed {base.seed}", f"{base.run_dir}: loss {base.val_loss:.4f}, weights {weights_hash}"
    sizes = {name: (arm.train_tokens, arm.val_tokens) for name, arm in record.arms.items()}
    tokens = _by_value({name: f"{n:,} in training, {m:,} in validation" for name, (n, m) in sizes.items()})
    yield "tokens of the text", tokens
    for key in ("data_hash", "tokenizer_hash", "source_hash"):
        yield key.replace("_", " "), _by_value({name: arm.identity[key][:16] for name, arm in record.arms.items()})
    yield "resumed after an interruption", f"{int(done['resumed_from'].notna().sum())} of {len(done)}"
    spent = [duration(frame["seconds"].sum()) for frame in (done, results.trials)]
    yield "computing time", f"reported runs {spent[0]}; search trials {spent[1]}"


def _by_value(values: dict[str, str]) -> str:
    """A value that all arms share, else each with its arms."""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return "; ".join(value if len(names) == 1 else f"{value} ({', '.join(of)})" for value, of in names.items())


def _relative(folder: Path) -> Path | str:
    """A relative path as it was given, an absolute one from the working directory if it lies below, else its last name.

    A report that is published thus says nothing of the machine's other folders; the last name needs its path again.
    """
    below = folder.is_relative_to(Path.cwd())
    return folder.relative_to(Path.cwd()) if below else folder.name if folder.is_absolute() else folder


def results_frame(results: Results) -> pd.DataFrame:
    """A row for each run; what a run does not have is empty. `purpose` says which rows belong together:

    reported: what the verdicts rest on; trial: of the tuning; unused: made for other settings, code or seeds than are
    asked for now, kept so that nothing is lost.
    """
    tuned = dict.fromkeys(key for arm in results.record.arms for key in results.hyperparameters(arm))
    runs = results.runs.assign(budgets=results.runs.groupby("run_dir")["budget"].transform(" ".join))
    runs = runs.drop_duplicates("run_dir")
    reported, unused = (runs[runs["purpose"] == purpose] for purpose in ("reported", "unused"))
    frames = [frame for frame in (reported, results.trials.assign(purpose="trial"), unused) if len(frame)]
    frame = pd.concat(frames, ignore_index=True)
    where = [key for key in WHERE if key in frame and frame[key].notna().any()]
    return frame.reindex(columns=[*ROW, *(key for key in tuned if key in frame), *where])


def curves_csv(results: Results) -> str:
    """What each run but the trials scored during its training."""
    curves = results.curves.drop_duplicates(["run_dir", "step"])
    return str(curves[["run_dir", *POINT]].to_csv(index=False, lineterminator="\n"))


def report_json(results: Results, warnings: list[Warning]) -> dict[str, Any]:
    """The report in numbers; what is not known is null."""
    record, contrasts = results.record, results.contrasts
    interactions = contrasts["family"] == "interaction"
    reported = results.runs[results.runs["purpose"] == "reported"].drop_duplicates("run_dir")
    with_error = reported[reported["error"].fillna("") != ""]
    content = {
        "schema_version": SCHEMA_VERSION,
        "question": record.question,
        "verdict": sentences(results),
        "contrasts": contrasts[~interactions].to_dict("records"),
        "interactions": [
            {"name": row["arm"], "formula": row["baseline"]} | row for row in contrasts[interactions].to_dict("records")
        ],
        "warnings": [warning._asdict() for warning in warnings],
        "arms": [_mean_json(results, name, budget) for budget in record.budgets for name in record.arms],
        "cost": {name: _cost_json(results, name) for name in record.arms},
        "runs": run_counts(results)
        | {"rows": len(rows_alone(results))}
        | {"reasons": with_error[["arm", "seed", "status", "error", "run_dir"]].to_dict("records")},
        "tuning": {name: _search_json(results, name) for name in results.trials["arm"].unique()},
        "hashes": {name: arm.identity for name, arm in record.arms.items()},
        "paths": {name: str(results.folder / name) for name in FILES},
    }
    return dict(_plain(content | {key: getattr(record, key) for key in RECORDED}))


def _mean_json(results: Results, name: str, budget: str) -> dict[str, Any]:
    values = finished(results, name, budget)[results.record.metric].astype(float)
    low, high = interval([*values]) or (None, None)
    statistics = {"n": len(values), "mean": values.mean(), "sd": values.std(), "ci_low": low, "ci_high": high}
    return {"arm": name, "budget": budget} | statistics


def _cost_json(results: Results, name: str) -> dict[str, float]:
    """Seconds of computing, in finished runs."""
    reported = results.runs[results.runs["purpose"] == "reported"].drop_duplicates("run_dir")
    kinds = {"reported": reported, "trials": results.trials}
    return {kind: float(runs[runs["arm"] == name]["seconds"].sum()) for kind, runs in kinds.items()}


def _search_json(results: Results, name: str) -> dict[str, Any]:
    trials, hyperparameters = results.trials[results.trials["arm"] == name], results.hyperparameters(name)
    columns = ["trial", "search", "seed", "run_dir", *hyperparameters, "score", "status"]
    inside = results.tuned_arms[name].is_interior() if name in results.tuned_arms else {}
    chosen = {"chosen": results.record.arms[name].tuned, "inside": inside}
    return {"hyperparameters": hyperparameters, **chosen, "trials": trials[columns].to_dict("records")}


def _plain(value: Any) -> Any:
    """Values as JSON has them: no NaN, no types of numpy and pandas."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return (
        None if value is pd.NA or value is None or value != value or value in (float("inf"), -float("inf")) else value
    )
