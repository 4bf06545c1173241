"""What a plan says about itself that weakens its answer: a few words, and what they mean."""

from collections.abc import Iterator
from typing import Any

from lm.ablation.plan.arms import Arm
from lm.ablation.run.tuning import Tuning
from lm.config.ablation import AblationConfig
from lm.training.optim import LOW, peak_factor

FIXED = ("baseline", "primary", "baselines", "equivalence_margin", "budgets")  # that decide the verdict, not the runs
Caution = tuple[str, str]


def cautions(tuning: Tuning, record: dict[str, Any]) -> list[Caution]:
    return [*history(tuning.ablation, record), *warm_up(tuning.ablation, tuning.arms), *short_search(tuning)]


def looked(ablation: AblationConfig, record: dict[str, Any]) -> list[dict[str, Any]]:
    """What an ablation asked whenever a verdict was seen, this one included; each look that asked otherwise once."""
    looks = list(record.get("looks", []))
    if (now := {"seeds": ablation.seeds} | {key: getattr(ablation, key) for key in FIXED}) not in looks:
        looks.append(now)
    return looks


def history(ablation: AblationConfig, record: dict[str, Any]) -> Iterator[Caution]:
    """5 % is the chance of a false verdict for who looks once, not for who goes on until there is one."""
    looks = record.get("looks", [])
    before = [look["seeds"] for look in looks if len(look["seeds"]) > 1 and set(look["seeds"]) < set(ablation.seeds)]
    if before:
        seen = ", ".join(str(len(seeds)) for seeds in before)
        yield (
            f"Seeds were added after a verdict was seen (at {seen}, now {len(ablation.seeds)}):",
            "so one is found where there is none more often than in 5 of 100 cases; only fresh seeds keep to that.",
        )
    for key in FIXED:
        values = [str(look[key]) for look in looks if look[key] != getattr(ablation, key)]
        if values:
            yield f"Changed after a verdict was seen: {key}", f"(before: {', '.join(dict.fromkeys(values))})."


def warm_up(ablation: AblationConfig, arms: dict[str, Arm]) -> Iterator[Caution]:
    for name, arm in arms.items():
        steps = min(arm.steps[budget] for budget in ablation.budgets)
        if (peak := peak_factor(steps, arm.run.optim)) < LOW:
            yield f"The warm-up of {name} is long:", f"its rate never rises above {peak:.0%} of optim.lr."


def short_search(tuning: Tuning) -> Iterator[Caution]:
    trials = tuning.decided or tuning.settings.trials
    for name, search in tuning.searches.items():
        if 0 < trials < (least := 1 + 2 * len(search.hyperparameters)):
            yield (
                f"{name} is tuned in {trials} trials:",
                f"{least} look to both sides of {' and '.join(search.hyperparameters)}.",
            )
