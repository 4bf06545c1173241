"""What weakens a verdict. Each rule yields the arms or comparisons to which it applies, with words for them."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from lm.data.text import MIN_COPIED
from lm.lab.ablation.folder import UNUSED, AblationRecord
from lm.lab.ablation.judge import Contrast
from lm.lab.ablation.question import MIN_SEEDS, RUN_METRICS
from lm.lab.ablation.results import Results
from lm.lab.report.figures import shorten
from lm.system.terminal import to_override_value

FEW_SEEDS = 5  # with fewer, the standard deviation is a rough estimate
FLAT = 0.05  # p of the F test that the values of a ladder do not differ
CONDITIONS = {key: key for key in ("device", "cpu", "threads", "precision", "python", "torch")}
CONDITIONS |= {"cpu": "CPU", "python": "Python"}


class Weakness(NamedTuple):
    summary: str
    detail: str
    about: frozenset[str] = frozenset()  # the arms and comparisons that have it; empty: all

    def __str__(self) -> str:
        return f"{self.summary} {self.detail}"


@lru_cache(maxsize=2)
def report_warnings(results: Results) -> list[Weakness]:
    """Return what weakens the verdicts of an ablation."""
    if results.frozen is not None:
        return [Weakness("The contrasts of this study are frozen as published.", "They are not computed anew.")]
    if results.question.metric not in RUN_METRICS:
        return [*_rows_warnings(results)]
    return [*run_warnings(results), *plan_warnings(results.record), *_of_ladders(results), *_mixed_pairs(results)]


def weakening(contrast: Contrast, weaknesses: Iterable[Weakness]) -> list[str]:
    """Return what weakens one comparison, in a few words each; what applies to all applies to it."""
    own = {contrast.name, *contrast.weights}
    own |= {f"{arm} - {other}" for arm in contrast.weights for other in contrast.weights}
    return [
        weakness.summary.partition(":")[0].rstrip(".")
        for weakness in weaknesses
        if not weakness.about or own & weakness.about
    ]


def _about(summary: str, named: Iterable[tuple[str, str]], detail: str) -> Iterator[Weakness]:
    """Yield one weakness of all that are named, each by its name and its words; nothing if there are none."""
    if pairs := [*named]:
        about = frozenset(name for name, _ in pairs)
        yield Weakness(f"{summary}: {', '.join(words for _, words in pairs)}.", detail, about)


def run_warnings(results: Results) -> Iterator[Weakness]:
    """Yield what the runs say, whatever they were made of."""
    counts = results.counts()
    total = sum(counts.values())
    if untuned := ", ".join(results.untuned()):
        yield Weakness(f"Tuning is not finished ({untuned}).", "The same command goes on with it.")
    if counts["missing"]:
        yield Weakness(f"{counts['done']} of {total} runs are done.", "Verdicts can still change.")
    for status, words in (("failed", "have failed"), ("killed", "were killed from outside")):
        if counts[status]:
            yield Weakness(f"{counts[status]} of {total} runs {words}.", "The same command makes them again.")
    asked = results.answers()
    n_pairs = max((row.n_seeds for row in asked), default=0)  # a lost run leaves fewer pairs than seeds
    n = n_pairs if n_pairs and not counts["missing"] else results.n_seeds
    if n < FEW_SEEDS:
        needed = f" A verdict needs {MIN_SEEDS}." if n < MIN_SEEDS else ""
        words = f"There are only {n} seeds." if n > 1 else "There is only one seed."
        if n < results.n_seeds:
            words = f"Only {n} of {results.n_seeds} seeds have a pair."
        yield Weakness(words, f"The standard deviation of so few differences is a rough estimate.{needed}")


def plan_warnings(record: AblationRecord) -> Iterator[Weakness]:
    """Yield what the plan alone says, before anything is run."""
    if changed := record.changed_after():
        yield Weakness(
            f"The design changed after {changed} results.",
            "If a result led to the change, a false verdict is more likely than 5 %.",
        )
    best = [name for name, arm in record.arms.items() if arm.settings.get("checkpoint.best")]
    detail = "With checkpoint.best a loss is lower by what this choice gains, which a text of its own would not show."
    yield from _about("The scored model is chosen by the text that scores it", zip(best, best, strict=True), detail)
    yield from _about(
        "Tokens have more context in one arm than in the other",
        _unequal_contexts(record),
        "Each arm is scored as it is trained, and more context alone lowers a loss.",
    )
    if (copied := min((arm.copied for arm in record.arms.values()), default=0.0)) >= MIN_COPIED:  # of all arms
        yield Weakness(
            f"{100 * copied:.0f} % of a validation text stands in the training text too.",
            "Arms that memorise may score better on this part, and on no other text.",
        )
    yield from _about(
        "The validation text stands in the training text of one arm",
        _unequal_copies(record),
        "That arm has memorised a part of this text, so the verdict does not generalise.",
    )


def _unequal_contexts(record: AblationRecord) -> Iterator[tuple[str, str]]:
    for pair in record.question.pairs().items():
        first, second = (record.arms[name] for name in pair)
        for key in ("data.seq_len", "data.document_mask"):
            own, other = (to_override_value(arm.settings.get(key)) for arm in (first, second))
            if own != other:
                yield " - ".join(pair), f"{' and '.join(pair)} ({key} {own} and {other})"
        if first.identity.get("tokenizer_hash") != second.identity.get("tokenizer_hash"):
            share = f"{first.scored_tokens[0] / second.scored_tokens[0]:.2g}"
            if share != "1":
                yield " - ".join(pair), f"{' and '.join(pair)} (a text has {share} times as many tokens in {pair[0]})"


def _unequal_copies(record: AblationRecord) -> Iterator[tuple[str, str]]:
    for pair in record.question.pairs().items():
        first, second = (record.arms[name] for name in pair)
        own, other = first.copied, second.copied
        is_same = first.identity.get("data_hash") == second.identity.get("data_hash")
        if not is_same and abs(own - other) > 0.02:  # one of fifty stretches may be there by chance
            words = f"{100 * own:.0f} % of it in {pair[0]} and {100 * other:.0f} % of it in {pair[1]}"
            yield " - ".join(pair), words


def _of_ladders(results: Results) -> Iterator[Weakness]:
    ends = {arm: ladder.end for arm, ladder in results.ladders.items() if ladder.end}
    yield from _about(
        "The best value is an end of the ladder",
        ((arm, f"{arm} ({end} end)") for arm, end in ends.items()),
        "The interval counts the slope there over one factor of two. That is an extrapolation, not a bound.",
    )
    flat = [arm for arm, ladder in results.ladders.items() if ladder.p_equal is not None and ladder.p_equal > FLAT]
    detail = "Either the arm is broad there, or its best value lies elsewhere: see the figure."
    yield from _about("No difference shows between the values of a ladder", zip(flat, flat, strict=True), detail)


def _mixed_pairs(results: Results) -> Iterator[Weakness]:
    """Yield the pairs whose runs were made under different conditions."""
    seeds: dict[tuple[str, str], set[int]] = {}
    planned = {name: arm.settings | arm.identity for name, arm in results.record.arms.items()}
    for key, name in CONDITIONS.items():
        known = results.done.dropna(subset=key)
        of_arms = known.groupby(["arm", "seed"])[key].agg(lambda values: " and ".join(sorted({*map(str, values)})))
        for arm, other in results.question.pairs().items():
            if planned[arm].get(key) != planned[other].get(key):
                continue  # the arms differ in this condition by their settings, so the difference is the question
            for seed in results.question.seeds:
                own, baseline = of_arms.get((arm, seed)), of_arms.get((other, seed))
                if own and baseline and own != baseline:
                    words = f"{arm} and {other}, {name} {own} and {baseline}"
                    seeds.setdefault((f"{arm} - {other}", words), set()).add(seed)
    yield from _about(
        "Two runs of a pair were made under different conditions",
        ((pair, f"{words}, seed {', '.join(map(str, sorted(own)))}") for (pair, words), own in seeds.items()),
        "Their difference is partly one of these. To repeat them remove their folders and rows, then call ablate.",
    )


def _rows_warnings(results: Results) -> Iterator[Weakness]:
    """Yield which rows are left out, and what weakens a verdict of so few seeds."""
    alone = results.runs[results.runs["purpose"] == UNUSED].groupby("arm", sort=False)["seed"]
    names = ", ".join(f"{arm} seed {shorten(', '.join(map(str, seeds)), 60)}" for arm, seeds in alone)
    summary = f"{alone.size().sum()} of {len(results.runs)} rows have no pair: {names}."
    yield from [Weakness(summary, "They are left out.")] * bool(names)
    # Seeds that diverged are told by the sentence; these seeds are missing besides.
    lost = {row.name: {seed for seeds in row.diverged.values() for seed in seeds} for row in results.contrasts}
    fewer = [row for row in results.contrasts if row.n_seeds + len(lost[row.name]) < row.n_planned]
    if parts := ", ".join(f"{row.arm} has {row.n_seeds} of {row.n_planned}" for row in fewer):
        yield Weakness(f"Pairs are missing: {parts}.", "The seeds that an arm lacks may be those that it lost.")
    yield from run_warnings(results)
