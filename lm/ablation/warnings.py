"""What weakens an answer: for each weakness a sentence that names it and one that says what it means."""

from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd

from lm.ablation import views
from lm.ablation.contrasts import decimals
from lm.ablation.power import ALPHA
from lm.ablation.record import AblationRecord
from lm.ablation.results import Results
from lm.ablation.statistics import holm, interval, normality_p
from lm.ablation.tuning import factors_moved

MIN_SEEDS = 4  # with fewer, one more often changes a verdict
MIN_SEEDS_AT_LOOK = 5  # where arms are tuned: with fewer, tuning has too few degrees of freedom for a small level
MAX_TIME_RATIO = 0.02  # runs at equal time whose measured times differ by more did not have equal time
NEAR_HALF = 0.1  # of the tokens: as far from half of them the validation may be that stands for it
FAR = 0.99  # factors from where tuning began, in two or more hyperparameters: errors are more frequent there
CONDITIONS = {"device": "device", "cpu": "CPU", "threads": "threads", "precision": "precision", "python": "Python"}
CONDITIONS |= {"torch": "torch"}
UNKNOWN = "unknown"


class Warning(NamedTuple):
    summary: str
    detail: str


def plan_warnings(record: AblationRecord) -> list[Warning]:
    """What the plan alone says, before anything is run."""
    return [*_early_look(record), *_long_warm_up(record), *_short_search(record)]


def report_warnings(results: Results) -> list[Warning]:
    curves = views.curves_shown(results)
    about_runs = [*_progress(results), *_seeds_added(results), *_unused(results), *_lost(results)]
    about_curves = [*_without_curve(results), *_fading(results, curves), *_rising(results, curves)]
    about_trials = [*_edges(results), *_moved(results), *_unequal_trials(results)]
    about_trials += [*_noise_not_counted(results)]
    about_differences = [*_small(results), *_shape(results)]
    about_conditions = [*_unequal_time(results), *_mixed_pairs(results)]
    planned = plan_warnings(results.record)
    return [*about_runs, *planned, *about_trials, *about_differences, *about_curves, *about_conditions]


def _early_look(record: AblationRecord) -> Iterator[Warning]:
    if record.tune.trials and record.looks and record.looks[0] < MIN_SEEDS_AT_LOOK:
        yield Warning(
            f"The first look comes at {record.looks[0]} seeds, and arms are tuned.",
            f"False verdicts are then more likely than 5 %. Plan it at {MIN_SEEDS_AT_LOOK} seeds or more.",
        )


def _long_warm_up(record: AblationRecord) -> Iterator[Warning]:
    for name, arm in record.arms.items():
        steps = min(arm.steps[budget] for budget in record.budgets)
        optim = {key.removeprefix("optim."): value for key, value in arm.settings.items() if key.startswith("optim.")}
        if 10 * optim.get("warmup_steps", 0) <= steps:
            continue  # the rate rises to nine tenths or more, whatever the decay
        from lm.config import OptimConfig
        from lm.training.optim import MIN_PEAK_LR_FACTOR, peak_lr_factor  # imports torch

        if (peak := peak_lr_factor(steps, OptimConfig(**optim))) < MIN_PEAK_LR_FACTOR:
            detail = f"Its learning rate never rises above {peak:.0%} of optim.lr."
            yield Warning(f"The warm-up of {name} is long.", detail)


def _short_search(record: AblationRecord) -> Iterator[Warning]:
    """Arms with fewer trials than values on both sides of the centre need: those made, or those planned."""
    if not record.tune.trials:
        return
    keys = {
        name: [key for key in record.tune.hyperparameters if arm.settings.get(key)] for name, arm in record.arms.items()
    }
    most = max(map(len, keys.values()), default=0)
    for name, varied in keys.items():
        made = sum(trial.arm == name for trial in record.trials) if record.arms[name].tuned else 0
        share = min(record.tune.trials, round(2 + (record.tune.trials - 2) * len(varied) / max(1, most)))
        if (trials := made or share) < (least := 1 + 2 * len(varied)):
            detail = f"Values on both sides of {' and '.join(varied)} need at least {least}."
            yield Warning(f"Few search trials for arm {name} ({trials}).", detail)


def _progress(results: Results) -> Iterator[Warning]:
    counts, n = views.run_counts(results), len(results.record.seeds)
    if counts["missing"]:
        yield Warning(f"{counts['done']} of {sum(counts.values())} runs are done.", "Verdicts can still change.")
    if n == 1:
        yield Warning("There is only one seed.", "A confidence interval and a verdict need at least two.")
    elif n < MIN_SEEDS:
        summary = f"Only {n} seeds are planned." if counts["missing"] else f"There are only {n} seeds."
        yield Warning(summary, "Their standard deviation is a rough estimate: a verdict is a hint.")
    if untuned := results.record.untuned():
        detail = "Their runs wait for it. If a trial has failed, call ablate again to repeat it."
        yield Warning(f"Tuning is not finished ({', '.join(untuned)}).", detail)


def _seeds_added(results: Results) -> Iterator[Warning]:
    """5 % is the chance of a false verdict for a single analysis, not if its result decides whether to add seeds.

    Planned looks are part of a design that keeps the level, so they are no reason for a warning.
    """
    record = results.record
    seeds, planned = set(record.seeds), [set(record.seeds[:n]) for n in record.looks]
    ended_seeds = [set(ended) for ended in results.record.analyses if len(ended) > 1]
    if fewer := {len(ended) for ended in ended_seeds if ended < seeds and ended not in planned}:
        before = ", ".join(map(str, sorted(fewer)))
        yield Warning(
            f"Seeds were added after the ablation had ended (with {before}, now {len(seeds)}).",
            "If that verdict decided whether to add seeds, a false verdict is more likely than 5 %.",
        )
    if dropped := sorted(set().union(*ended_seeds) - seeds):
        yield Warning(
            f"Seeds were taken away after the ablation had ended ({', '.join(map(str, dropped))}).",
            "If that verdict decided which, a false verdict is more likely than 5 %.",
        )


def _unused(results: Results) -> Iterator[Warning]:
    """Finished runs of other seeds: taking seeds away after seeing their results can produce any verdict."""
    runs = results.runs
    unused = runs[(runs["purpose"] == "unused") & (runs["status"] == "done")]
    unused = unused[unused["run_dir"].str.startswith("cells/") & unused["arm"].isin([*results.record.arms])]
    asked_for = {*runs[runs["purpose"] == "reported"][["arm", "seed"]].itertuples(index=False, name=None)}
    pairs = [*unused[["arm", "seed"]].itertuples(index=False, name=None)]
    if others := sorted({*pairs} - asked_for):
        names = ", ".join(f"{arm} seed {seed}" for arm, seed in others)
        yield Warning(f"Finished runs are left out: {names}.", "Leaving runs out can change a verdict.")
    if n := sum(pair in asked_for for pair in pairs):
        yield Warning(
            f"{n} finished run{'s are' if n > 1 else ' is'} not used.",
            "The settings, the text or the training code were different.",
        )


def _lost(results: Results) -> Iterator[Warning]:
    details = {
        "diverged": "Comparisons leave its seed out, and an arm that diverged is never called better or equivalent.",
        "failed": "Comparisons leave its seed out until ablate has repeated the run, and meanwhile an arm that "
        "failed, unless it was killed, is never called better or equivalent.",
    }
    reported = views.reported(results)
    for status, detail in details.items():
        arms = reported[reported["status"] == status]["arm"]
        if n := len(arms):
            yield Warning(f"{n} run{'s' * (n > 1)} {status} ({', '.join(arms.unique())}).", detail)


def _without_curve(results: Results) -> Iterator[Warning]:
    if n := len({*views.done(results)["run_dir"]} - {*results.curves["run_dir"]}):
        detail = "There is no metrics.csv and no row in curves.csv. Whether a difference shrinks cannot be checked."
        yield Warning(f"{n} run{'s have' if n > 1 else ' has'} no learning curve.", detail)


def _edges(results: Results) -> Iterator[Warning]:
    interior = {name: arm.is_interior() for name, arm in results.tuned_arms.items()}
    for inside, summary, detail in (
        (False, "The best value lies at the edge of the search range", "A better value may lie beyond it."),
        (None, "Some hyperparameters were not varied", "There were too few search trials for all of them."),
    ):
        keys = {arm: [key for key, where in by_key.items() if where is inside] for arm, by_key in interior.items()}
        if names := "; ".join(f"{arm} ({', '.join(own)})" for arm, own in keys.items() if own):
            yield Warning(f"{summary}: {names}.", detail)


def _moved(results: Results) -> Iterator[Warning]:
    """Arms that have ended far from where their first search began, in two or more hyperparameters."""
    record, names = results.record, []
    for name, arm in results.tuned_arms.items():
        start = next(trial.values for trial in record.trials if trial.arm == name)
        factors = factors_moved(start, arm.settings, record.tune.factor)
        far = [key for key, factor in factors.items() if abs(factor) >= FAR]
        if len(far) > 1:
            names.append(f"{name} ({', '.join(far)})")
    if names:
        yield Warning(
            f"Tuning ended far from where it began: {'; '.join(names)}.",
            "Where hyperparameters interact strongly, such an arm may not have reached its best settings, and the "
            "interval does not count that. Let it begin at the settings that it has found.",
        )


def _unequal_trials(results: Results) -> Iterator[Warning]:
    """Arms of as many hyperparameters with other numbers of trials, as after a later call that added an arm.

    A trial that belongs to several searches, which begin at one place, counts in each of them.
    """
    counts: dict[int, dict[int, list[str]]] = {}
    for arm in results.record.arms:
        n_trials = sum(len(trial.searches) for trial in results.record.trials if trial.arm == arm)
        if n_trials:
            counts.setdefault(len(results.hyperparameters(arm)), {}).setdefault(n_trials, []).append(arm)
    if unequal := [by_count for by_count in counts.values() if len(by_count) > 1]:
        words = "; ".join(f"{', '.join(arms)} {n}" for by_count in unequal for n, arms in by_count.items())
        yield Warning(f"Numbers of search trials differ: {words}.", "Arms with more of them may be tuned better.")


def _noise_not_counted(results: Results) -> Iterator[Warning]:
    """Comparisons of tuned arms whose regret is not known."""
    contrasts = views.merged(results, results.contrasts)
    searched = {*results.trials["arm"]}
    missing = [
        f"{views.name_of(contrast)}{views.at_equal(results, contrast)}"
        for _, contrast in contrasts[contrasts["n_seeds"] > 0].iterrows()
        if not contrast["tuning_sd"] and views.weights(contrast).keys() <= searched
    ]
    if missing:
        yield Warning(
            f"The noise of tuning is not counted: {', '.join(missing)}.",
            "For k hyperparameters this needs 2k + 1 trials that did not diverge. The interval counts the seeds only.",
        )


def _small(results: Results) -> Iterator[Warning]:
    """A difference that is shown can still be smaller than the margin."""
    margin = results.record.equivalence_margin
    for contrast in _decided(results):
        if min(abs(contrast["ci_low"]), abs(contrast["ci_high"])) < margin:
            summary = f"The difference {_between(results, contrast)} may be too small to matter."
            interval_name = views.ci(results.contrasts)
            yield Warning(summary, f"The {interval_name} reaches into the equivalence margin of ±{margin:g}.")


def _shape(results: Results) -> Iterator[Warning]:
    """Differences that are skewed or spiked, after correction for their number (Holm)."""
    contrasts = [contrast for _, contrast in views.merged(results, views.asked(results.contrasts)).iterrows()]
    ps = holm([normality_p([*views.differences(results, contrast)]) for contrast in contrasts])
    odd = [contrast for contrast, p in zip(contrasts, ps, strict=True) if p <= ALPHA]
    if names := ", ".join(f"{views.name_of(contrast)}{views.at_equal(results, contrast)}" for contrast in odd):
        yield Warning(
            f"Differences are skewed or have outliers: {names}.",
            "The t test takes them for normal; of such differences it finds one where there is none in about 10 of "
            "100 cases, not 5. Look at the results per seed.",
        )


def _fading(results: Results, curves: pd.DataFrame) -> Iterator[Warning]:
    """A difference that shrank in the second half of training and, by as much again, would fall within the margin.

    A hint: the midpoint of a run is not the result of a run of half the length, for its learning rate is still high.
    """
    margin = results.record.equivalence_margin
    digits = decimals(margin)
    for contrast in _decided(results, results.record.budgets[0]):
        if contrast["family"] == "interaction":
            continue
        pairs = _halfway(results, curves, contrast["arm"], contrast["baseline"])
        if pairs.empty:
            continue
        before, now, lead = pairs["half"].mean(), pairs["end"].mean(), contrast["mean_difference"]
        low, high = interval([*(pairs["end"] - pairs["half"])]) or (0, 0)
        shrinks = low > 0 if lead < 0 else high < 0
        if shrinks and margin <= abs(lead) < margin + abs(now - before):
            yield Warning(
                f"The difference {_between(results, contrast)} shrinks during training.",
                f"It was {before:+z.{digits}f} halfway through training and {now:+z.{digits}f} at the end. Longer "
                "training may change the verdict: repeat the ablation with twice the steps.",
            )


def _halfway(results: Results, curves: pd.DataFrame, arm: str, baseline: str) -> pd.DataFrame:
    """The difference after half of training and at its end, by seed, of which both are known.

    Empty where the arms see unequal numbers of tokens: their curves end at other places.
    """
    record, budget = results.record, results.record.budgets[0]
    ends = {record.arms[name].steps[budget] * record.arms[name].tokens_per_step for name in (arm, baseline)}
    rows = []
    for _, gap in views.gap_table(curves, arm, baseline).items():
        gap = gap.dropna()
        if gap.empty or ends != {end := gap.index.max()}:
            continue
        half = min(gap.index, key=lambda tokens: abs(2 * tokens - end))
        if abs(2 * half - end) <= NEAR_HALF * end:
            rows.append((gap[half], gap[end]))
    return pd.DataFrame(rows, columns=["half", "end"])


def _rising(results: Results, curves: pd.DataFrame) -> Iterator[Warning]:
    """Arms that overfit, as models do that see a small text in many epochs.

    Estimates are compared with estimates: the points that were scored on as much of the text as the first one.
    """
    if not views.lower_is_better(results):
        return
    first = curves.groupby("run_dir")["val/tokens"].transform("first")
    alike = curves[(curves["val/tokens"] == first) | first.isna()]
    names = []
    for arm in results.record.arms:
        mean = views.over_seeds(views.curve_table(alike, arm))["mean"]
        if len(mean) and (rise := mean.iloc[-1] - mean.min()) > results.record.equivalence_margin:
            names.append(f"{arm} (by {rise:.2g})")
    if names:
        summary = f"The validation loss rises before the end: {', '.join(names)}."
        yield Warning(summary, "The ablation compares overfitted models.")


def _unequal_time(results: Results) -> Iterator[Warning]:
    contrasts = views.asked(results.contrasts)
    for _, contrast in contrasts[(contrasts["budget"] == "time") & (contrasts["family"] != "interaction")].iterrows():
        ratios = time_ratios(results, contrast["arm"], contrast["baseline"], "time")
        if len(ratios) and abs(ratios.median() - 1) > MAX_TIME_RATIO:
            words = f"{contrast['arm']} took {ratios.median():.3f} times as long as {contrast['baseline']}"
            words += f" (median of {len(ratios)} pairs: {ratios.min():.2f} to {ratios.max():.2f})" * (len(ratios) > 1)
            detail = "A step was measured before the runs; other load during them changes what it takes."
            yield Warning(f"Training times at equal time differ by more than 2 %: {words}.", detail)


def time_ratios(results: Results, arm: str, baseline: str, budget: str) -> pd.Series:
    """By pair, the measured seconds of training of the arm divided by those of the baseline."""
    seconds = [views.finished(results, name, budget)["seconds"].astype(float) for name in (arm, baseline)]
    return (seconds[0] / seconds[1].where(seconds[1] > 0)).dropna()


def _mixed_pairs(results: Results) -> Iterator[Warning]:
    """Pairs whose two runs were made under different conditions."""
    seeds: dict[str, set[int]] = {}
    contrasts = results.contrasts[results.contrasts["family"] != "interaction"]
    for _, contrast in contrasts.iterrows():
        arms = [views.finished(results, contrast[side], contrast["budget"]) for side in ("arm", "baseline")]
        both = arms[0].index.intersection(arms[1].index)
        for key, name in CONDITIONS.items():
            first, second = (runs.loc[both, key].astype(object).fillna(UNKNOWN).map(str) for runs in arms)
            for seed in both[(first != second) & (first != UNKNOWN) & (second != UNKNOWN)]:
                words = f"{contrast['arm']} and {contrast['baseline']}, {name} {first[seed]} and {second[seed]}"
                seeds.setdefault(words, set()).add(int(seed))
    if seeds:
        words = "; ".join(f"{pair}, seed {', '.join(map(str, sorted(of)))}" for pair, of in seeds.items())
        yield Warning(
            f"Two runs of a pair were made under different conditions: {words}.",
            "Their difference is partly one of these conditions. Remove such runs, then call ablate to repeat them.",
        )


def _decided(results: Results, budget: str | None = None) -> Iterator[pd.Series]:
    """Comparisons with a difference that was shown, of one budget or of all."""
    for _, contrast in views.merged(results, views.asked(results.contrasts)).iterrows():
        by_difference = contrast["verdict"] in ("better", "worse") and not contrast["by_divergence"]
        if by_difference and budget in (None, contrast["budget"]):
            yield contrast


def _between(results: Results, contrast: pd.Series) -> str:
    if contrast["family"] == "interaction":
        return f"of {contrast['arm']}{views.at_equal(results, contrast)}"
    return f"between {contrast['arm']} and {contrast['baseline']}{views.at_equal(results, contrast)}"
