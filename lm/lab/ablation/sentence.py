"""A verdict in one sentence: what is better, by how much, how sure that is, and what was not done."""

import math
from collections.abc import Iterable, Mapping, Sequence

from lm.cli.arguments import key_of
from lm.lab.ablation.folder import ArmRecord
from lm.lab.ablation.judge import Contrast, decimals, interval, sides
from lm.lab.ablation.question import AGAIN, LEARNING_RATE, METRICS, MIN_SEEDS, RUN_METRICS, SEED, Question
from lm.lab.ablation.tuning import LADDER
from lm.lab.report.pages import fixed, signed

TOO_FAR = 5.0  # nats, above which a ratio of perplexities tells nothing
TWICE = math.log(1.99)  # nats, below which two digits write a share of perplexity in per cent
RATES = {"optim.lr", "optim.adam_lr", "optim.lr_scale"}  # arms that differ in these need no word about tuning
UNDECIDED_BY = {
    "seeds": f"a verdict needs {MIN_SEEDS} seeds",
    "equal": "all differences are identical, so no test is possible",
    "unstable": "fewer than three values of an arm are left",
    "survivors": "an arm lost some seeds, and the others may favour it",
}


def sentence(contrast: Contrast, question: Question, arms: Mapping[str, ArmRecord]) -> str:
    """Return the verdict of a contrast in words. Arms that are values of one setting are called by these values."""
    pair = [] if contrast.family == "weighted" else [arms[name] for name in contrast.weights]
    names = _values(*pair) or sides(contrast.weights)
    verdict = {
        "better": " is better than ".join(names),
        "worse": " is worse than ".join(names),
        "equivalent": f"{' and '.join(names)} are equivalent{_within(contrast)}",
        "undecided": f"{(' against ' if pair else ' compared with ').join(names)} is undecided",
    }
    compared = [arms[name] for name in contrast.weights]
    tuning = _tuning(contrast, question, compared)
    finding = f"{verdict[contrast.verdict]}: {_finding(contrast, question, compared)}"
    finding = f"{finding}, {tuning}" if tuning else finding
    parts = [finding, _costs(*pair), *_lost(contrast), *_gains(contrast, question), *_missing(contrast, question)]
    if tuning and question.tune is None and not contrast.failed and not question.question.startswith(AGAIN):
        n = len(question.arms) * len(question.seeds) * len(LADDER)
        parts.append(f"to tune the learning rates, add tune=true ({n} runs or more)")
    return "; ".join(filter(None, parts)) + "."


def _finding(contrast: Contrast, question: Question, arms: Sequence[ArmRecord]) -> str:
    """Return the mean difference with its interval, of losses as perplexity."""
    mean, low, high = contrast.mean_difference, contrast.ci_low, contrast.ci_high
    if contrast.untrainable:
        return f"no run of {' and '.join(contrast.untrainable)} trained"
    if mean is None:
        return "no seed has finished in all arms"
    alpha = contrast.alpha
    if contrast.verdict == "equivalent":  # the interval of the two one-sided tests
        alpha *= 2
        low, high = interval(contrast.differences, alpha) or (mean, mean)
        low, high = low - contrast.gain_low, high + contrast.gain_high
    plural = "s" * (contrast.n_seeds > 1)
    seeds = f"{contrast.n_seeds} seed{plural}"
    if question.metric in RUN_METRICS:
        own = f", {'each ' * (contrast.n_seeds > 1)}on its own validation text"
        seeds += own if question.folds else ", on this validation text"
        bases = {base for arm in arms if (base := arm.settings.get("init_from")) and SEED not in base}
        if bases:  # each of them is the base of all seeds
            seeds += ", from this trained model" if len(bases) == 1 else ", from these trained models"
    if low is None or high is None:
        return f"{_amount(contrast, mean)} ({seeds}, which give no interval)"
    ends = f"{percent(1 - alpha)} CI {_end(contrast, low)} to {_end(contrast, high)}"
    return f"{_amount(contrast, mean)} ({ends}, {seeds})"


def _tuning(contrast: Contrast, question: Question, arms: Sequence[ArmRecord]) -> str:
    """Return at which values of the tuned setting the arms are scored, or that nothing is tuned."""
    keys = {key_of(word) for arm in arms for word in arm.overrides}
    if question.metric not in RUN_METRICS or (question.tune is None and keys and keys <= RATES):
        return ""
    if question.tune is None:
        return "at the config's learning rates, not tuned"
    best = {arm: factor for arm, factor in contrast.best.items() if factor}
    untuned = [arm for arm in contrast.weights if arm not in contrast.best]
    if len(untuned) == len(contrast.weights):
        return "not tuned"
    if not best:
        return ""
    values = ", ".join(f"{arm}: {factor:.2g} times the config's" for arm, factor in best.items())
    what = "learning rate" if question.tune == LEARNING_RATE else question.tune
    who = "each at its" if len(best) == len(contrast.weights) else f"{' and '.join(best)} at its"
    rest = f", {' and '.join(untuned)} not tuned" if untuned else ""
    tried = how_many(contrast.tried[arm] for arm in best)
    return f"{who} own best {what}, from {tried} values ({values}){rest}"


def how_many(numbers: Iterable[int]) -> str:
    """Return in words how many values the ladders of arms have.

    >>> how_many([5, 5]), how_many([4, 5]), how_many([])
    ('five', 'four to five', 'five')
    """
    words, sizes = ("no", "one", "two", "three", "four", "five"), {*numbers} or {len(LADDER)}
    fewest, most = words[min(sizes)], words[max(sizes)]
    return most if fewest == most else f"{fewest} to {most}"


def _costs(*pair: ArmRecord) -> str:
    """Return the parameters and FLOPs of an arm beside its baseline; empty where they are not known."""
    if len(pair) < 2 or not pair[0].n_params:
        return ""
    costs = []
    for noun, key in (("parameters", "n_params"), ("FLOPs per token", "flops_per_token")):
        own, other = (getattr(arm, key) for arm in pair)
        change = 100 * abs(own / other - 1)
        more = f"{change:.2g}" if change < 99.5 else f"{change:.0f}"
        costs.append(f"same {noun}" if own == other else f"{more} % {'more' if own > other else 'fewer'} {noun}")
    return ", ".join(costs)


def _lost(contrast: Contrast) -> list[str]:
    """Return how many values of a ladder did not train, and at which seeds a run diverged or failed."""
    told = []
    for arm, n in contrast.dropped.items():
        if contrast.tried[arm] == 1:
            told.append(f"{arm} failed at the value of the configuration, so it was not tuned")
            continue
        tried = how_many([contrast.tried[arm]])
        which = f"all {tried}" if n == contrast.tried[arm] else f"{n} of the {tried}"
        told.append(f"{which} values of {arm} diverged or failed or were far off")
    for what, lost in (("diverged", contrast.diverged), ("failed", contrast.failed)):
        told += [f"{arm} {what} at seed {', '.join(map(str, seeds))}" for arm, seeds in lost.items()]
    return told


def _gains(contrast: Contrast, question: Question) -> list[str]:
    """Return what arms may still gain where the best value is an end of the ladder."""
    digits, unit = decimals(question.equivalence_margin or 0.01), METRICS[question.metric].unit
    return [
        f"{arm} may still gain {fixed(gain, digits)} {unit} beyond its best value, which the interval counts"
        for arm, gain in contrast.gains.items()
    ]


def _missing(contrast: Contrast, question: Question) -> list[str]:
    """Return why a comparison is undecided, and what would decide it."""
    if contrast.verdict != "undecided" or contrast.undecided_by == "untrainable":
        return []
    if contrast.undecided_by == "seeds" and contrast.failed:  # what failed is to be mended
        return []
    if contrast.undecided_by:
        return [UNDECIDED_BY[contrast.undecided_by]]
    if contrast.gains:  # more seeds would not narrow what they add to the interval
        return []
    told, margin = [], contrast.equivalence_margin
    if (contrast.p or 1) <= contrast.alpha:
        told.append("the interval excludes zero, but not after correction for the number of comparisons")
    if margin and contrast.seeds_needed and contrast.seeds_needed > contrast.n_seeds:
        told.append(f"about {contrast.seeds_needed} seeds would detect {margin_in_words(contrast.metric, margin)}")
    elif contrast.minimum_detectable is not None:
        size = fixed(contrast.minimum_detectable, contrast.digits)
        unit = METRICS[contrast.metric].unit
        told.append(f"these {contrast.n_seeds} seeds would detect a difference of {size} {unit}")
        if margin and question.folds and contrast.seeds_needed is None:
            size = margin_in_words(contrast.metric, margin)
            told.append(f"to detect {size}, more seeds than this text has parts are needed: take a longer text")
    return told


# --- numbers and names


def percent(share: float) -> str:
    """Return a share in per cent.

    >>> percent(0.95), percent(0.97888)
    ('95 %', '97.9 %')
    """
    return f"{100 * share:.3g} %"


def margin_in_words(metric: str, margin: float) -> str:
    """Return an equivalence margin with its unit.

    >>> margin_in_words("val_loss", 0.01), margin_in_words("val_bpb", 0.01), margin_in_words("val_loss", 3)
    ('1 % of perplexity', '0.01 bits per byte', '3 nats per token')
    """
    if metric == "val_loss" and margin < TWICE:
        return f"{100 * math.expm1(margin):.2g} % of perplexity"
    return f"{margin:g} {METRICS[metric].unit}"


def _within(contrast: Contrast) -> str:
    margin = contrast.equivalence_margin
    return f" within {margin_in_words(contrast.metric, margin)}" if margin else ""


def _is_perplexity(contrast: Contrast) -> bool:
    """Return whether differences are shown as ratios of perplexities."""
    far = max(abs(value or 0.0) for value in (contrast.mean_difference, contrast.ci_low, contrast.ci_high))
    return contrast.metric == "val_loss" and contrast.family != "weighted" and far < TOO_FAR


def _amount(contrast: Contrast, mean: float) -> str:
    if not _is_perplexity(contrast):
        return f"{signed(mean, contrast.digits)} {METRICS[contrast.metric].unit}"
    share, digits = 100 * abs(math.expm1(mean)), _digits_of_share(contrast)
    if share < 0.5 * 10**-digits and contrast.verdict in ("equivalent", "undecided"):
        return "the same perplexity"
    return f"{share:.{digits}f} % {'lower' if mean < 0 else 'higher'} perplexity"


def _digits_of_share(contrast: Contrast) -> int:
    """Return the decimals of a share in per cent: one, or more for a narrow interval or margin."""
    narrowest = min(filter(None, (contrast.half_width, contrast.equivalence_margin)), default=1.0)
    return max(1, decimals(100 * narrowest) - 2)


def _end(contrast: Contrast, value: float) -> str:
    if not _is_perplexity(contrast):
        return signed(value, contrast.digits)
    return f"{100 * math.expm1(value):+.{_digits_of_share(contrast)}f} %"


def _values(*pair: ArmRecord) -> tuple[str, str] | None:
    """Return the values of the one setting in which two arms differ, the first with its name; None if it is more."""
    overrides = [arm.overrides for arm in pair if arm.overrides]
    if len(overrides) < 2:
        return None
    (*added, own), (*others, other) = overrides
    key = key_of(own)
    if key_of(other) != key or own == other or added != others:
        return None
    return f"{key.rpartition('.')[2]}={own.partition('=')[2]}", other.partition("=")[2]
