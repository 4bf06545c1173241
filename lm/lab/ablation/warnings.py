"""What weakens an answer: a sentence that names the weakness, and one that says what it means.

A weakness is found as the arms and comparisons that have it, each with its words; there is none where there are none.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import pandas as pd

from lm.config import flat
from lm.lab.ablation.contrasts import Contrast, decimals
from lm.lab.ablation.record import AblationRecord, design_of
from lm.lab.ablation.results import Results, curve_table, gap_table, over_seeds
from lm.lab.ablation.statistics import are_equal, interval
from lm.lab.ablation.tuning import search_size
from lm.system.terminal import signed, to_override_value

ROUGH = "Their standard deviation is a rough estimate."
MIN_SEEDS = 4  # with fewer, one more often changes a verdict
MIN_SEEDS_AT_LOOK = 5  # where arms are tuned: with fewer, tuning has too few degrees of freedom for a small level
NEAR_HALF = 0.1  # of the tokens: as far from half of them the validation may be that stands for it
CONDITIONS = {key: key for key in ("device", "cpu", "threads", "precision", "python", "torch")}
CONDITIONS |= {"cpu": "CPU", "python": "Python"}
PEEKED = "If that verdict decided it, a false verdict is more likely than 5 %."


class Weakness(NamedTuple):
    summary: str
    detail: str
    about: frozenset[str] = frozenset()  # the arms and comparisons that have it; empty: all

    def __str__(self) -> str:
        return f"{self.summary} {self.detail}"


@lru_cache(maxsize=2)
def report_warnings(results: Results) -> list[Weakness]:
    if results.frozen is not None:
        return [Weakness("The contrasts of this study are frozen as published.", "They are not computed anew.")]
    return [*run_warnings(results), *plan_warnings(results.record), *_of_tuning(results), *_of_differences(results)]


def weakening(contrast: Contrast, weaknesses: Iterable[Weakness]) -> list[str]:
    """What weakens the answer of one comparison, in a few words each."""
    own = {contrast.name, *contrast.ended}
    return [weakness.summary.partition(":")[0] for weakness in weaknesses if own & weakness.about]


def _about(summary: str, named: Iterable[tuple[str, str]], detail: str) -> Iterator[Weakness]:
    """`named` are arms or comparisons with their words."""
    if pairs := [*named]:
        about = frozenset(name for name, _ in pairs)
        yield Weakness(f"{summary}: {', '.join(words for _, words in pairs)}.", detail, about)


def _named(keys: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    return ((name, f"{name} ({', '.join(own)})") for name, own in keys.items() if own)


def run_warnings(results: Results) -> Iterator[Weakness]:
    """What the runs say, whatever they were made of; the sentence of a comparison tells of those that diverged."""
    record, counts = results.record, results.counts()
    n, total = len(record.seeds), sum(counts.values())
    if counts["missing"]:
        yield Weakness(f"{counts['done']} of {total} runs are done.", "Verdicts can still change.")
    if counts["failed"]:
        yield Weakness(f"{counts['failed']} of {total} runs have failed.", "The same command makes them again.")
    if n == 1:
        yield Weakness("There is only one seed.", "A confidence interval and a verdict need at least two.")
    elif n < MIN_SEEDS:
        yield Weakness(f"There are only {n} seeds.", ROUGH)
    asked = results.asked()
    few = [row for row in asked if 2 <= row.n_seeds < min(n, MIN_SEEDS)]  # of which runs have failed, or have no pair
    pairs = ((row.name, f"{row.name}: {row.n_seeds}") for row in few)
    yield from _about("Some comparisons have fewer seeds", pairs, ROUGH)
    equal = [row.name for row in asked if row.n_seeds > 1 and are_equal(row.sd or 0.0, row.mean_difference or 0.0)]
    detail = "Seeds that change nothing are no sample: see that they reach the runs."
    yield from _about("Differences are equal on all seeds", zip(equal, equal, strict=True), detail)
    if untuned := ", ".join(record.untuned()):
        yield Weakness(f"Tuning is not finished ({untuned}).", "The same command repeats a trial that failed.")


def plan_warnings(record: AblationRecord) -> Iterator[Weakness]:
    """What the plan alone says, before anything is run."""
    yield from _about("Changed after a verdict was seen", _changed(record), PEEKED)
    first, is_tuned = min(record.looks, default=0), bool(record.tune.trials)
    if is_tuned and 0 < first < MIN_SEEDS_AT_LOOK:
        yield Weakness(
            f"The first planned look comes at {first} seeds, and arms are tuned.",
            f"False verdicts are then more likely than 5 %. Plan it at {MIN_SEEDS_AT_LOOK} seeds or more.",
        )
    yield from _about(
        "The scored model is chosen by the text that scores it",
        ((name, name) for name in record.best_arms()),
        "With checkpoint.best a loss is lower by what this choice gains, which a text of its own would not show.",
    )
    yield from _about(
        "Tokens have more context in one arm than in the other",
        _unequal_contexts(record),
        "Each arm is scored as it is trained, and more context alone lowers a loss; equal tokens may be unequal text.",
    )
    detail = "What it has read it knows by heart: the verdict is not about the rest of its text."
    yield from _about("The validation text stands in the training text of one arm", _unequal_copies(record), detail)
    detail = "k hyperparameters need 2k + 2: values on both sides of each, and one to say how noisy a trial is."
    yield from _about("There are few search trials", _short_search(record), detail)


def _of_tuning(results: Results) -> Iterator[Weakness]:
    arms = results.tuned_arms
    yield from _about(
        "No setting was found that trains",
        ((name, name) for name, arm in arms.items() if not arm.trains()),
        "Every trial diverged, so comparisons with such an arm are undecided. Let its search begin elsewhere.",
    )
    yield from _about(
        "The learning rates that were tried make no difference",
        ((name, name) for name, reason in results.failed_searches.items() if reason == "flat"),
        "They may lie on a plateau far below the best, so there is no verdict that a better one could undo. Let the "
        "search begin higher, or allow more trials.",
    )
    yield from _about(
        "The best value lies at the edge of the search range",
        _named({name: arm.at_edge() for name, arm in arms.items()}),
        "A better value may lie beyond it. Where the loss still falls by more than the margin per factor, there is no "
        "verdict that this could undo; where it is flat, begin elsewhere.",
    )
    yield from _about(
        "The last search still moved by more than a quarter factor",
        _named({name: arm.moved() for name, arm in arms.items()}),
        "Such an arm may not have reached its best settings, and the interval does not count that. Let it begin at the "
        "settings that it has found, or allow more trials.",
    )
    yield from _about(
        "The noise of tuning is not counted",
        _noise_not_counted(results),
        "For k hyperparameters this needs 2k + 2 trials that did not diverge. The interval counts the seeds only.",
    )


def _of_differences(results: Results) -> Iterator[Weakness]:
    detail = "Longer training may change the verdict: repeat the ablation with twice the steps."
    yield from _about("Differences shrink during training", _shrinking(results), detail)
    detail = "The ablation compares overfitted models."
    yield from _about("The validation loss rises before the end", _rising(results), detail)
    yield from _about(
        "Two runs of a pair were made under different conditions",
        _mixed_pairs(results),
        "Their difference is partly one of these. To repeat them remove their folders and rows, then call ablate.",
    )


# --- names of what has a weakness


def _changed(record: AblationRecord) -> Iterator[tuple[str, str]]:
    """What earlier designs have otherwise, by key; an arm that is added makes no verdict easier.

    Planned looks are part of a design that keeps the level: seeds that they add or spare are no change.
    """
    now, values = flat(design_of(record)), dict[str, list[str]]()
    for design in record.designs_seen:
        made_of = {arm: own for arm, own in design["made_of"].items() if arm in record.arms}  # else "arms" tells
        before = flat(design | {"made_of": made_of})
        n = min(len(before["seeds"]), len(now["seeds"]))
        is_look = before["looks"] == now["looks"] != [] and before["seeds"][:n] == now["seeds"][:n]
        for key in {**before, **now}:
            is_new = key.startswith(("arms.", "made_of.")) and key not in before
            is_change = (before.get(key) or None) != (now.get(key) or None)
            if is_change and not is_new and not (is_look and key == "seeds"):
                values.setdefault(key, []).append(f"{to_override_value(before.get(key) or None):.40}")
    for key, earlier in values.items():
        yield "", f"{key} (before: {', '.join(dict.fromkeys(earlier))})"


def _unequal_contexts(record: AblationRecord) -> Iterator[tuple[str, str]]:
    for pair in record.pairs.items():
        first, second = (record.arms[name] for name in pair)
        for key in ("data.seq_len", "data.document_mask"):
            own, other = (to_override_value(arm.settings.get(key)) for arm in (first, second))
            if own != other:
                yield pair[0], f"{' and '.join(pair)} ({key} {own} and {other})"
        if first.identity.get("tokenizer_hash") != second.identity.get("tokenizer_hash"):
            share = f"{first.val_tokens / second.val_tokens:.2g}"
            if share != "1":
                yield pair[0], f"{' and '.join(pair)} (a text has {share} times as many tokens in {pair[0]})"


def _unequal_copies(record: AblationRecord) -> Iterator[tuple[str, str]]:
    for pair in record.pairs.items():
        own, other = (record.arms[name].copied for name in pair)
        if abs(own - other) > 0.02:  # one of fifty stretches may be there by chance
            yield pair[0], f"{100 * own:.0f} % of it in {pair[0]} and {100 * other:.0f} % of it in {pair[1]}"


def _short_search(record: AblationRecord) -> Iterator[tuple[str, str]]:
    """Arms whose search has fewer trials, made or planned, than values on both sides of the centre need.

    If none has more than these, all arms: then nothing says how noisy a trial is.
    """
    keys, numbers = dict[str, list[str]](), dict[str, int]()
    for name, arm in record.arms.items() if record.tune.trials else ():
        searches = [*record.searches(name).values()] if arm.tuned else []
        keys[name] = [key for key in record.tune.hyperparameters if arm.settings.get(key)]
        if keys[name]:
            numbers[name] = searches.count(max(searches, default=0)) or search_size(len(keys[name]), record.tune)
    nothing_pooled = all(n <= 1 + 2 * len(keys[name]) for name, n in numbers.items())
    for name, n in numbers.items():
        if nothing_pooled or n < 1 + 2 * len(keys[name]):
            yield name, f"{name} ({n} for {' and '.join(keys[name])})"


def _noise_not_counted(results: Results) -> Iterator[tuple[str, str]]:
    """Comparisons of tuned arms whose regret is not known."""
    searched = {*results.trials["arm"]}
    for row in results.comparisons:
        if row.n_seeds and not row.is_tuning_counted and row.ended.keys() <= searched:
            yield row.name, row.name


def _shrinking(results: Results) -> Iterator[tuple[str, str]]:
    """A difference that shrank in the second half of training and, by as much again, would fall within the margin.

    A hint: the midpoint of a run is not the result of a run of half the length, for its learning rate is still high.
    """
    margin, digits = results.record.equivalence_margin, decimals(results.record.equivalence_margin)
    called = [row for row in results.asked() if row.verdict in ("better", "worse") and row.family != "interaction"]
    for row in called:
        half, end = _halfway(results, row.arm, row.baseline)
        low, high = interval([*(end - half)]) or (0, 0)
        mean = row.mean_difference or 0.0
        shrinks = low > 0 if mean < 0 else high < 0
        if shrinks and margin <= abs(mean) < margin + abs((end - half).mean()):
            words = f"{signed(half.mean(), digits)} halfway, {signed(end.mean(), digits)} at the end"
            yield row.name, f"{row.name} ({words})"


def _halfway(results: Results, arm: str, baseline: str) -> tuple[pd.Series, pd.Series]:
    """The differences after half of training and at its end, by the seeds of which both are known.

    None where the arms see unequal numbers of tokens: their curves end at other places.
    """
    arms, budget = results.record.arms, results.record.budget
    gap = gap_table(results.curves_shown, arm, baseline).dropna(how="all")
    end = gap.index.max()
    half = min(gap.index, key=lambda tokens: abs(2 * tokens - end), default=end)
    are_equal = {arms[name].steps[budget] * arms[name].tokens_per_step for name in (arm, baseline)} == {end}
    seeds = gap.columns if are_equal and abs(2 * half - end) <= NEAR_HALF * end else []
    both = gap.reindex(index=[half, end], columns=seeds).dropna(axis=1)
    return both.iloc[0], both.iloc[1]


def _rising(results: Results) -> Iterator[tuple[str, str]]:
    """Arms that overfit, as models do that see a small text in many epochs.

    Estimates are compared with estimates: the points that were scored on as much of the text as the first one.
    """
    curves = results.curves_shown
    first = curves.groupby("run_dir")["val/tokens"].transform("first")
    alike = curves[(curves["val/tokens"] == first) | first.isna()]
    for arm in results.record.arms if results.lower_is_better else ():
        mean = over_seeds(curve_table(alike, arm))["mean"]
        if len(mean) and (rise := mean.iloc[-1] - mean.min()) > results.record.equivalence_margin:
            yield arm, f"{arm} (by {rise:.2g})"


def _mixed_pairs(results: Results) -> list[tuple[str, str]]:
    """Pairs whose two runs were made under different conditions."""
    seeds: dict[tuple[str, str], set[int]] = {}
    for row in (row for row in results.contrasts if row.family != "interaction"):
        first, second = (results.done_of(name) for name in (row.arm, row.baseline))
        pairs = first.merge(second, left_index=True, right_index=True, suffixes=("_arm", "_baseline"))
        for key, name in CONDITIONS.items():
            both = pairs[[f"{key}_arm", f"{key}_baseline"]].dropna().astype("string")
            for seed, first, second in both[both.iloc[:, 0] != both.iloc[:, 1]].itertuples(name=None):
                words = f"{row.arm} and {row.baseline}, {name} {first} and {second}"
                seeds.setdefault((row.arm, words), set()).add(int(seed))
    return [(arm, f"{words}, seed {', '.join(map(str, sorted(own)))}") for (arm, words), own in seeds.items()]
