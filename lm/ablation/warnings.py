"""What weakens an answer: tables of a condition, the sentence that names the weakness, and one that says what it means.

Most conditions are the names of what they are about, separated by commas: a warning is shown if there are any.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pandas as pd

from lm.ablation import views
from lm.ablation.contrasts import decimals
from lm.ablation.power import ALPHA
from lm.ablation.record import AblationRecord
from lm.ablation.results import Results
from lm.ablation.statistics import holm, interval
from lm.ablation.tuning import factors_moved

MIN_SEEDS = 4  # with fewer, one more often changes a verdict
MIN_SEEDS_AT_LOOK = 5  # where arms are tuned: with fewer, tuning has too few degrees of freedom for a small level
MAX_TIME_RATIO = 0.02  # runs at equal time whose measured times differ by more did not have equal time
NEAR_HALF = 0.1  # of the tokens: as far from half of them the validation may be that stands for it
FAR = 0.99  # factors from where tuning began, in two or more hyperparameters: errors are more frequent there
CONDITIONS = {"device": "device", "cpu": "CPU", "threads": "threads", "precision": "precision", "python": "Python"}
CONDITIONS |= {"torch": "torch"}
UNKNOWN = "unknown"

Table = list[tuple[Any, str, str]]


class Warning(NamedTuple):
    summary: str
    detail: str


@lru_cache(maxsize=2)
def report_warnings(results: Results) -> list[Warning]:
    table = [*_about_runs(results), *_about_plan(results.record), *_about_tuning(results), *_about_results(results)]
    return [Warning(summary, detail) for condition, summary, detail in table if condition]


def plan_warnings(record: AblationRecord) -> list[Warning]:
    """What the plan alone says, before anything is run."""
    return [Warning(summary, detail) for condition, summary, detail in _about_plan(record) if condition]


def _about_plan(record: AblationRecord) -> Table:
    first = min(record.looks, default=0)
    early = record.tune.trials and 0 < first < MIN_SEEDS_AT_LOOK
    slow, short = ", ".join(_long_warm_up(record)), ", ".join(_short_search(record))
    return [
        (
            early,
            f"The first planned look comes at {first} seeds, and arms are tuned.",
            f"False verdicts are then more likely than 5 %. Plan it at {MIN_SEEDS_AT_LOOK} seeds or more.",
        ),
        (slow, f"The warm-up is long: {slow}.", "The learning rate never rises above this share of optim.lr."),
        (
            short,
            f"There are few search trials: {short}.",
            "k hyperparameters need 2k + 1, on both sides of each value.",
        ),
    ]


def _about_runs(results: Results) -> Table:
    record, counts, runs = results.record, results.counts(), views.distinct(results.reported())
    n, untuned, added, dropped = len(record.seeds), record.untuned(), _seeds_added(record), _seeds_dropped(record)
    left_out, n_replaced = _unused(results)
    names = runs["arm"] + " seed " + runs["seed"].astype("string")
    diverged, failed = (", ".join(names[runs["status"] == status]) for status in ("diverged", "failed"))
    n_flat = len({*views.done(results)["run_dir"]} - {*results.curves["run_dir"]})
    peeked = "If that verdict decided it, a false verdict is more likely than 5 %."
    return [
        (counts["missing"], f"{counts['done']} of {len(runs)} runs are done.", "Verdicts can still change."),
        (n == 1, "There is only one seed.", "A confidence interval and a verdict need at least two."),
        (1 < n < MIN_SEEDS, f"There are only {n} seeds.", "Their standard deviation is a rough estimate."),
        (untuned, f"Tuning is not finished ({', '.join(untuned)}).", "The same command repeats a trial that failed."),
        (added, f"Seeds were added after the ablation had ended (with {added}, now {n}).", peeked),
        (dropped, f"Seeds were taken away after the ablation had ended ({dropped}).", peeked),
        (left_out, f"Finished runs are left out: {left_out}.", "Leaving runs out can change a verdict."),
        (
            n_replaced,
            f"Finished runs no longer count: {n_replaced}.",
            "Settings, text or training code were different.",
        ),
        (
            diverged,
            f"Runs diverged: {diverged}.",
            "Comparisons leave these seeds out, and an arm that diverged is never called better or equivalent.",
        ),
        (
            failed,
            f"Runs failed: {failed}.",
            "Comparisons leave these seeds out until ablate has repeated the runs. Meanwhile an arm that failed, "
            "unless it was killed, is never called better or equivalent.",
        ),
        (n_flat, f"Runs without a learning curve: {n_flat}.", "Whether a difference shrinks cannot be checked."),
    ]


def _about_tuning(results: Results) -> Table:
    edges, fixed, unequal = _at_position(results, False), _at_position(results, None), _unequal_trials(results)
    far, uncounted = ", ".join(_moved(results)), ", ".join(_noise_not_counted(results))
    return [
        (edges, f"The best value lies at the edge of the search range: {edges}.", "A better value may lie beyond it."),
        (fixed, f"Some hyperparameters were not varied: {fixed}.", "There were too few search trials for all of them."),
        (
            far,
            f"Tuning ended far from where it began: {far}.",
            "Where hyperparameters interact strongly, such an arm may not have reached its best settings, and the "
            "interval does not count that. Let it begin at the settings that it has found.",
        ),
        (unequal, f"Numbers of search trials differ: {unequal}.", "Arms with more of them may be tuned better."),
        (
            uncounted,
            f"The noise of tuning is not counted: {uncounted}.",
            "For k hyperparameters this needs 2k + 1 trials that did not diverge. The interval counts the seeds only.",
        ),
    ]


def _about_results(results: Results) -> Table:
    ci, margin = views.ci(results.contrasts), results.record.equivalence_margin
    small, skewed, shrinking, rising, unequal = (
        ", ".join(condition(results)) for condition in (_small, _skewed, _shrinking, _rising, _unequal_time)
    )
    mixed = _mixed_pairs(results)
    return [
        (
            small,
            f"Differences may be too small to matter: {small}.",
            f"The {ci} reaches into the margin of ±{margin:g}.",
        ),
        (
            skewed,
            f"Differences are skewed or have outliers: {skewed}.",
            "The t test takes them for normal; of such differences it finds one where there is none in about 10 of "
            "100 cases, not 5. Look at the results per seed.",
        ),
        (
            shrinking,
            f"Differences shrink during training: {shrinking}.",
            "Longer training may change the verdict: repeat the ablation with twice the steps.",
        ),
        (rising, f"The validation loss rises before the end: {rising}.", "The ablation compares overfitted models."),
        (
            unequal,
            f"Training times at equal time differ by more than 2 %: {unequal}.",
            "A step was measured before the runs; other load during them changes what it takes.",
        ),
        (
            mixed,
            f"Two runs of a pair were made under different conditions: {mixed}.",
            "Their difference is partly one of these conditions. Remove such runs, then call ablate to repeat them.",
        ),
    ]


# --- conditions: names of arms, of runs or of comparisons


def _long_warm_up(record: AblationRecord) -> Iterator[str]:
    for name, arm in record.arms.items():
        steps = min(arm.steps[budget] for budget in record.budgets)
        optim = {key.removeprefix("optim."): value for key, value in arm.settings.items() if key.startswith("optim.")}
        if 10 * optim.get("warmup_steps", 0) <= steps:
            continue  # the rate rises to nine tenths or more, whatever the decay
        from lm.config import OptimConfig
        from lm.training.optim import MIN_PEAK_LR_FACTOR, peak_lr_factor  # imports torch

        if (peak := peak_lr_factor(steps, OptimConfig(**optim))) < MIN_PEAK_LR_FACTOR:
            yield f"{name} ({100 * peak:.0f} %)"


def _short_search(record: AblationRecord) -> Iterator[str]:
    """Arms with fewer trials than values on both sides of the centre need: those made, or those planned."""
    keys = {
        name: [key for key in record.tune.hyperparameters if arm.settings.get(key)] for name, arm in record.arms.items()
    }
    most = max(map(len, keys.values()), default=0)
    for name, varied in keys.items() if record.tune.trials else ():
        made = sum(trial.arm == name for trial in record.trials) if record.arms[name].tuned else 0
        share = min(record.tune.trials, round(2 + (record.tune.trials - 2) * len(varied) / max(1, most)))
        if (made or share) < 1 + 2 * len(varied):
            yield f"{name} ({made or share} for {' and '.join(varied)})"


def _ended_with(record: AblationRecord) -> list[set[int]]:
    """The sets of seeds with which the ablation has ended and given verdicts."""
    return [set(seeds) for seeds in record.analyses if len(seeds) > 1]


def _seeds_added(record: AblationRecord) -> str:
    """Planned looks are part of a design that keeps the level, so they are no reason for a warning."""
    planned = [set(record.seeds[:n]) for n in record.looks]
    fewer = {len(seeds) for seeds in _ended_with(record) if seeds < {*record.seeds} and seeds not in planned}
    return ", ".join(map(str, sorted(fewer)))


def _seeds_dropped(record: AblationRecord) -> str:
    return ", ".join(map(str, sorted(set().union(*_ended_with(record)) - {*record.seeds})))


def _unused(results: Results) -> tuple[str, int]:
    """The finished runs of other seeds, and how many were made otherwise.

    Taking seeds away after seeing their results can produce any verdict.
    """
    runs = results.runs
    unused = runs[(runs["purpose"] == "unused") & (runs["status"] == "done") & runs["run_dir"].str.startswith("cells/")]
    unused = unused[unused["arm"].isin([*results.record.arms])]
    asked_for = {*results.reported()[["arm", "seed"]].itertuples(index=False, name=None)}
    pairs = [*unused[["arm", "seed"]].itertuples(index=False, name=None)]
    left_out = ", ".join(f"{arm} seed {seed}" for arm, seed in sorted({*pairs} - asked_for))
    return left_out, sum(pair in asked_for for pair in pairs)


def _at_position(results: Results, position: bool | None) -> str:
    """Hyperparameters chosen at the edge (False) of the values tried, or not varied (None)."""
    keys = {
        name: [key for key, inside in arm.is_interior().items() if inside is position]
        for name, arm in results.tuned_arms.items()
    }
    return ", ".join(f"{arm} ({', '.join(own)})" for arm, own in keys.items() if own)


def _moved(results: Results) -> Iterator[str]:
    """Arms that have ended far from where their first search began, in two or more hyperparameters."""
    record = results.record
    for name, arm in results.tuned_arms.items():
        start = next(trial.values for trial in record.trials if trial.arm == name)
        factors = factors_moved(start, arm.settings, record.tune.factor)
        far = [key for key, factor in factors.items() if abs(factor) >= FAR]
        if len(far) > 1:
            yield f"{name} ({', '.join(far)})"


def _unequal_trials(results: Results) -> str:
    """Arms of as many hyperparameters with other numbers of trials, as after a later call that added an arm.

    A trial that belongs to several searches, which begin at one place, counts in each of them.
    """
    counts: dict[int, dict[int, list[str]]] = {}
    for arm in results.record.arms:
        n_trials = sum(len(trial.searches) for trial in results.record.trials if trial.arm == arm)
        if n_trials:
            counts.setdefault(len(results.hyperparameters(arm)), {}).setdefault(n_trials, []).append(arm)
    unequal = [by_count for by_count in counts.values() if len(by_count) > 1]
    return "; ".join(f"{', '.join(arms)} {n}" for by_count in unequal for n, arms in by_count.items())


def _noise_not_counted(results: Results) -> Iterator[str]:
    """Comparisons of tuned arms whose regret is not known."""
    shown, searched = views.comparisons(results), {*results.trials["arm"]}
    for row in shown[(shown["n_seeds"] > 0) & ~shown["is_tuning_counted"]].itertuples():
        if row.ended.keys() <= searched:
            yield row.name + row.at_equal


def _decided(results: Results) -> pd.DataFrame:
    """Comparisons that answer the question with a difference that was shown."""
    shown = views.asked(results)
    return shown[shown["verdict"].isin(["better", "worse"]) & ~shown["by_divergence"].astype(bool)]


def _small(results: Results) -> Iterator[str]:
    """A difference that is shown can still be smaller than the margin."""
    for row in _decided(results).itertuples():
        if min(abs(row.ci_low), abs(row.ci_high)) < row.equivalence_margin:
            yield row.name + row.at_equal


def _skewed(results: Results) -> Iterator[str]:
    """Differences that are skewed or spiked, after correction for their number (Holm)."""
    shown = views.asked(results)
    ps = holm([*shown["p_normal"]])
    yield from (shown["name"] + shown["at_equal"])[[p <= ALPHA for p in ps]]


def _shrinking(results: Results) -> Iterator[str]:
    """A difference that shrank in the second half of training and, by as much again, would fall within the margin.

    A hint: the midpoint of a run is not the result of a run of half the length, for its learning rate is still high.
    """
    margin, shown = results.record.equivalence_margin, _decided(results)
    digits = decimals(margin)
    shown = shown[(shown["family"] != "interaction") & (shown["budget"] == results.record.budgets[0])]
    for row in shown.itertuples():
        pairs = _halfway(results, row.arm, row.baseline)
        if pairs.empty:
            continue
        before, now, lead = pairs["half"].mean(), pairs["end"].mean(), row.mean_difference
        low, high = interval([*(pairs["end"] - pairs["half"])]) or (0, 0)
        shrinks = low > 0 if lead < 0 else high < 0
        if shrinks and margin <= abs(lead) < margin + abs(now - before):
            yield f"{row.name}{row.at_equal} ({before:+z.{digits}f} halfway, {now:+z.{digits}f} at the end)"


def _halfway(results: Results, arm: str, baseline: str) -> pd.DataFrame:
    """The difference after half of training and at its end, by seed, of which both are known.

    Empty where the arms see unequal numbers of tokens: their curves end at other places.
    """
    record, budget = results.record, results.record.budgets[0]
    ends = {record.arms[name].steps[budget] * record.arms[name].tokens_per_step for name in (arm, baseline)}
    rows = []
    for _, gap in views.gap_table(views.curves_shown(results), arm, baseline).items():
        gap = gap.dropna()
        if gap.empty or ends != {end := gap.index.max()}:
            continue
        half = min(gap.index, key=lambda tokens: abs(2 * tokens - end))
        if abs(2 * half - end) <= NEAR_HALF * end:
            rows.append((gap[half], gap[end]))
    return pd.DataFrame(rows, columns=["half", "end"])


def _rising(results: Results) -> Iterator[str]:
    """Arms that overfit, as models do that see a small text in many epochs.

    Estimates are compared with estimates: the points that were scored on as much of the text as the first one.
    """
    curves = views.curves_shown(results)
    first = curves.groupby("run_dir")["val/tokens"].transform("first")
    alike = curves[(curves["val/tokens"] == first) | first.isna()]
    for arm in results.record.arms if views.lower_is_better(results) else ():
        mean = views.over_seeds(views.curve_table(alike, arm))["mean"]
        if len(mean) and (rise := mean.iloc[-1] - mean.min()) > results.record.equivalence_margin:
            yield f"{arm} (by {rise:.2g})"


def _unequal_time(results: Results) -> Iterator[str]:
    shown = views.asked(results)
    for row in shown[(shown["budget"] == "time") & (shown["family"] != "interaction")].itertuples():
        ratios = time_ratios(results, row.arm, row.baseline, "time")
        if len(ratios) and abs(ratios.median() - 1) > MAX_TIME_RATIO:
            spread = f"{ratios.min():.2f} to {ratios.max():.2f}"
            yield f"{row.arm} took {ratios.median():.3f} times as long as {row.baseline} (pairs: {spread})"


def time_ratios(results: Results, arm: str, baseline: str, budget: str) -> pd.Series:
    """By pair, the measured seconds of training of the arm divided by those of the baseline."""
    seconds = [views.done_of(results, name, budget)["seconds"].astype(float) for name in (arm, baseline)]
    return (seconds[0] / seconds[1].where(seconds[1] > 0)).dropna()


def _mixed_pairs(results: Results) -> str:
    """Pairs whose two runs were made under different conditions."""
    seeds: dict[str, set[int]] = {}
    contrasts = results.contrasts[results.contrasts["family"] != "interaction"]
    for row in contrasts.itertuples():
        arms = [views.done_of(results, name, row.budget) for name in (row.arm, row.baseline)]
        both = arms[0].index.intersection(arms[1].index)
        for key, name in CONDITIONS.items():
            first, second = (runs.loc[both, key].astype(object).fillna(UNKNOWN).map(str) for runs in arms)
            for seed in both[(first != second) & (first != UNKNOWN) & (second != UNKNOWN)]:
                words = f"{row.arm} and {row.baseline}, {name} {first[seed]} and {second[seed]}"
                seeds.setdefault(words, set()).add(int(seed))
    return "; ".join(f"{pair}, seed {', '.join(map(str, sorted(of)))}" for pair, of in seeds.items())
