"""The report of an ablation: report.html, report.md, report.json, results.csv, curves.csv and figures/.

In: the record and the frames of an ablation's folder, at any moment. Out: files; nothing is computed here but means.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pandas as pd

from lm.ablation import figures, views
from lm.ablation.contrasts import decimals, percent
from lm.ablation.export import curves_csv, report_json, results_frame
from lm.ablation.record import AblationRecord
from lm.ablation.results import Results
from lm.ablation.warnings import CONDITIONS, UNKNOWN, Warning, report_warnings, time_ratios
from lm.config.ablation import BUDGET_NAMES
from lm.report.figures import inline
from lm.report.pages import render
from lm.system.files import write_text
from lm.system.terminal import duration

REFRESH = 30  # seconds between two readings of the page of a running ablation
ALT = {  # what is read aloud in place of a figure
    "forest": "Differences with their confidence intervals",
    "seeds": "The final metric of every run, a line for each seed across the arms",
    "learning": "Learning curves of all arms, and their differences from the baseline",
    "tuning": "Search trials over each hyperparameter, with the fitted curves",
    "setting": "Differences over the value of a setting",
    "bands": "Difference in loss by the frequency of the target token",
    "gradients": "Gradient norms and their cosine similarity over training",
}
HELD_EQUAL = {
    "tokens": "training tokens",
    "flops": "training FLOPs (within 2 %)",
    "time": "training time (planned from steps of each arm measured in turns; the ratios reached are among the arms)",
}


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
    record, curves, diagnostics = results.record, views.curves_shown(results), _diagnostics(results)
    drawn = {}
    if results.contrasts["mean_difference"].notna().any():
        drawn["forest"] = figures.forest(results)
    if views.run_counts(results)["done"]:
        drawn["seeds"] = figures.seeds(results)
    if any(len(views.over_seeds(views.curve_table(curves, arm))) > 1 for arm in record.arms):
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
        for seed, run in views.finished(results, arm, budget).iterrows():
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
    record, counts = results.record, views.run_counts(results)
    contrasts = views.merged(results, results.contrasts)
    rows = [_comparison(results, contrast) for _, contrast in contrasts.iterrows()]
    return {
        "title": record.question,
        "refresh": REFRESH if counts["missing"] else None,
        "running": bool(counts["missing"]),
        "digits": decimals(record.equivalence_margin),
        "unit": views.unit(results),
        "margin": f"{record.equivalence_margin:g}",
        "ci": views.ci(results.contrasts),
        "several_budgets": len(record.budgets) > 1,
        "answers": _answers(results),
        "basis": list(_basis(results)),
        "warnings": warnings,
        "comparisons": [row for row in rows if row["family"] != "interaction"],
        "interactions": [row for row in rows if row["family"] == "interaction"],
        "with_regret": any(pd.notna(row["regret"]) for row in rows),
        "lower_is_better": views.lower_is_better(results),
    }


def _answers(results: Results) -> list[dict[str, str]]:
    """The verdicts in words, each with what tuning leaves open of its mean."""
    digits, answers = decimals(results.record.equivalence_margin), []
    side = "above" if views.lower_is_better(results) else "below"
    contrasts = views.merged(results, views.asked(results.contrasts))
    for (_, contrast), sentence in zip(contrasts.iterrows(), views.sentences(results), strict=True):
        verdict, colon, rest = sentence.partition(":")
        regret = ""
        if pd.notna(contrast["mean_without_regret"]):
            regret = (
                f"{contrast['arm']} may be {contrast['regret']:.{digits}f} {side} its best, {contrast['baseline']} "
                f"{contrast['baseline_regret']:.{digits}f} (expected regret of tuning); without that the difference "
                f"is {contrast['mean_without_regret']:+z.{digits}f}."
            )
        answers.append(
            {"verdict": verdict + colon, "rest": rest.strip(), "regret": regret, "kind": contrast["verdict"]}
        )
    return answers


def _comparison(results: Results, contrast: pd.Series) -> dict[str, Any]:
    """A row of the tables of comparisons."""
    budget, arms = contrast["budget"], views.weights(contrast)
    diverged = {arm: len(views.seeds_with(results, arm, budget, "diverged")) for arm in arms}
    return contrast.to_dict() | {
        "budget": " and ".join(contrast["budgets"]),
        "bold": contrast["family"] == "primary",
        "diverged": {arm: f"{n} of {views.n_ended(results, arm, budget)}" for arm, n in diverged.items()},
        "any_diverged": any(diverged.values()),
    }


def _basis(results: Results) -> Iterator[tuple[str, str]]:
    """What the answer rests on."""
    record, counts = results.record, views.run_counts(results)
    n, total = len(record.seeds), sum(counts.values())
    most = "up to " if n > 1 and counts["done"] < total else ""
    yield "seeds", f"{most}{n} for each arm; {_start(record)}"
    better = "lower" if views.lower_is_better(results) else "higher"
    yield "metric", f"{views.METRIC_NAMES[record.metric]}; {better} is better"
    yield "equivalence margin", f"±{record.equivalence_margin:g}, the smallest difference that matters"
    yield "held equal", ", and in other runs ".join(HELD_EQUAL[budget] for budget in record.budgets)
    if matched := ", ".join(f"{arm} by {key}" for arm, key in record.match_parameters.items()):
        yield "parameters matched", matched
    yield "tuning", _tuned(results)
    yield "intervals", _counted(results)
    if others := _other_verdicts(results):
        yield "other comparisons", others
    if alone := len(views.rows_alone(results)):
        yield "runs without a folder", f"for {alone} of {total} runs, results.csv is all that is left"
    if stopped := views.stopped_early(results):
        yield "planned looks", stopped


def _start(record: AblationRecord) -> str:
    """What a seed sets, and so what the intervals cover."""
    if record.base is not None:
        losses = [base.val_loss for base in record.bases if base.seed in record.seeds and base.val_loss is not None]
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
    others = results.contrasts[first & ~results.contrasts.index.isin(views.asked(results.contrasts).index)]
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
        "svg": {
            name: inline(svg, f"{ALT[name]}: {alt}" if name == "forest" else ALT[name]) for name, svg in drawn.items()
        },
        "sign_flip": results.contrasts["p_sign_flip"].notna().any(),
        "inner_ci": percent(1 - 2 * results.contrasts["alpha"].iloc[0]),
        "alpha": f"{results.contrasts['alpha'].iloc[0]:.3g}",
        "looks": ", ".join(map(str, record.looks)),
        "metric_name": views.METRIC_NAMES[record.metric],
        "curve_coverage": _curve_coverage(results),
        "arms": list(_arms(results)),
        "common": [*record.common, *record.overrides],
        "reached": list(_reached(results)),
        "ratios": list(_ratios(results)),
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
    curves, record = views.curves_shown(results), results.record
    scored = curves.drop_duplicates("run_dir").set_index("arm")["val/tokens"].dropna()
    share = max((n / max(1, record.arms[arm].val_tokens - 1) for arm, n in scored.items()), default=1.0)
    if share == 1:
        return ""
    return (
        f"Points during training are estimates on {share:.0%} of the validation text; the score of the whole text is "
        "in the tables."
    )


def _arms(results: Results) -> Iterator[dict[str, Any]]:
    """What is changed in each arm and what it costs, in seconds over all seeds."""
    record, runs, trials = results.record, views.reported(results), results.trials
    for name, arm in record.arms.items():
        spent = {"time": runs[runs["arm"] == name]["seconds"].sum()}
        spent |= {"trial_time": trials[trials["arm"] == name]["seconds"].sum()}
        changes = {"matched_to": record.contrasts.get(name), "offset": record.seed_offsets.get(name)}
        yield {"name": name, "arm": arm} | changes | {key: duration(value) for key, value in spent.items()}


def _reached(results: Results) -> Iterator[dict[str, Any]]:
    """A row for each arm and budget, those of the same runs once."""
    record, digits = results.record, decimals(results.record.equivalence_margin)
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for budget in record.budgets:
        for name, arm in record.arms.items():
            runs = views.finished(results, name, budget)
            key = (name, *runs["run_dir"]) if len(runs) else (name, budget)
            if key in rows:
                rows[key]["budget"] += f" and {BUDGET_NAMES[budget]}"
                continue
            rows[key] = {
                "arm": name,
                "budget": BUDGET_NAMES[budget],
                "scores": [_mean_sd(runs[column], digits) for column in views.METRIC_NAMES],
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
    comparisons = views.merged(results, results.contrasts[results.contrasts["family"] != "interaction"])
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
        table = views.curve_table(diagnostics, arm, column) if column in diagnostics else pd.DataFrame()
        return None if table.empty else float(table.ffill().iloc[-1].mean())

    clip = views.curve_table(diagnostics, arm, "clip_rate")
    matrices = {"embedding": "embedding_norm", "LM head": "head_norm"}
    norms = {name: [last(f"{key}/{band}") for band in figures.BANDS] for name, key in matrices.items()}
    return {"arm": arm, "norms": norms, "clipped": None if clip.empty else 100 * clip.mean().mean()}


def _samples(results: Results) -> dict[str, Any]:
    """Continuations of the first seed that all arms have finished, of those for which the most have their folder."""
    record, budget = results.record, results.record.budgets[0]
    run_dirs = {arm: views.finished(results, arm, budget)["run_dir"] for arm in record.arms}
    seeds = [seed for seed in record.seeds if all(seed in runs.index for runs in run_dirs.values())]
    lost = set(views.rows_alone(results)["run_dir"])
    if not seeds:
        return {"seed": None, "prompts": [], "lost": ""}
    seed = min(seeds, key=lambda seed: sum(runs[seed] in lost for runs in run_dirs.values()))
    texts = {
        arm: {pair["prompt"]: pair["continuation"] for pair in results.samples(runs[seed])}
        for arm, runs in run_dirs.items()
    }
    asked_for = [name for name, arm in record.arms.items() if arm.settings.get("prompts") != []]
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


def _join(names: pd.Series) -> str:
    return " and ".join(names.dropna())


def _without_result(results: Results) -> dict[str, Any]:
    names = results.runs["budget"].map(BUDGET_NAMES).groupby(results.runs["run_dir"]).agg(_join)
    runs = views.reported(results).assign(purpose=lambda frame: "equal " + frame["run_dir"].map(names))
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
    done = views.done(results)
    return {
        "command": record.command,
        "report_command": f"{report} {shlex.quote(f'output_dir={_relative(results.folder)}')}",
        "facts_of_runs": [*_facts(results, done)],
    }


def _facts(results: Results, done: pd.DataFrame) -> Iterator[tuple[str, str]]:
    record = results.record
    yield "started, ended", f"{record.begun}, {record.ended or 'not yet'}"
    yield "machine of the last call", f"{record.machine}; runs in parallel: {record.workers}"
    for key, name in CONDITIONS.items():
        counts = Counter(done[key].astype(object).fillna(UNKNOWN).map(str))
        values = [value if len(counts) == 1 else f"{value} ({n} of {len(done)} runs)" for value, n in counts.items()]
        yield f"{name} of the runs", ", ".join(values) or "no run is finished yet"
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
