"""What in a plan and its history weakens its answer."""

from collections.abc import Iterator, Sequence
from dataclasses import fields

from lm.ablation.plan.arms import Arms
from lm.ablation.record import Caution
from lm.ablation.run.tuning import Tuning
from lm.config.ablation import AblationConfig, Look
from lm.training.optim import MIN_PEAK_LR_FACTOR, peak_lr_factor

FEWEST = 5  # seeds at the first look, where arms are tuned


def cautions(tuning: Tuning, looks: Sequence[Look], planned: Sequence[int]) -> list[Caution]:
    ablation, arms = tuning.ablation, tuning.arms
    return [*history(ablation, looks, planned), *early(ablation), *warm_up(ablation, arms), *short_search(tuning)]


def history(ablation: AblationConfig, looks: Sequence[Look], planned: Sequence[int]) -> Iterator[Caution]:
    """5 % is the chance of a false verdict for who looks once, not for who goes on, or stops, because of what is seen.

    `planned`: every seed that was ever asked for. Planned looks are no reason for a caution.
    """
    fewer = [one for one in looks if len(one.seeds) > 1 and set(one.seeds) < set(ablation.seeds)]
    if before := {len(one.seeds) for one in fewer if not in_plan(ablation, one)}:
        seen = ", ".join(map(str, sorted(before)))
        yield Caution(
            f"A verdict was seen with fewer seeds (at {seen}, now {len(ablation.seeds)}):",
            "if that verdict decided whether to add seeds, a false verdict is more likely than 5 %.",
        )
    if looks and (dropped := set(planned) - set(ablation.seeds)):
        yield Caution(
            f"Seeds were taken away after a verdict was seen ({', '.join(map(str, sorted(dropped)))}):",
            "if that verdict decided which, a false verdict is more likely than 5 %.",
        )
    for key in (one.name for one in fields(Look) if one.name != "seeds"):
        if values := [str(getattr(one, key)) for one in looks if getattr(one, key) != getattr(ablation, key)]:
            yield Caution(f"Changed after a verdict was seen: {key}", f"(before: {', '.join(dict.fromkeys(values))}).")


def in_plan(ablation: AblationConfig, look: Look) -> bool:
    n = len(look.seeds)
    return look.looks == ablation.looks and n in ablation.looks and look.seeds == ablation.seeds[:n]


def early(ablation: AblationConfig) -> Iterator[Caution]:
    """With three seeds the noise of tuning has too few degrees of freedom for a small level (tests/test_looks.py)."""
    if ablation.tune.trials and ablation.looks and ablation.looks[0] < FEWEST:
        yield Caution(
            f"The first look comes at {ablation.looks[0]} seeds, and arms are tuned:",
            f"false verdicts are then more likely than 5 %. Plan it at {FEWEST} seeds or more.",
        )


def warm_up(ablation: AblationConfig, arms: Arms) -> Iterator[Caution]:
    for name, arm in arms.items():
        steps = min(arm.steps[budget] for budget in ablation.budgets)
        if (peak := peak_lr_factor(steps, arm.run.optim)) < MIN_PEAK_LR_FACTOR:
            said = f"its learning rate never rises above {peak:.0%} of optim.lr."
            yield Caution(f"The warm-up of {name} is long:", said)


def short_search(tuning: Tuning) -> Iterator[Caution]:
    for name, search in tuning.searches.items():
        trials = len(search.done) if search.arm.tuned else tuning.share(name, tuning.settings.trials)
        if trials < (least := 1 + 2 * len(search.start)):
            yield Caution(
                f"Few search trials for arm {name} ({trials}):",
                f"values on both sides of {' and '.join(search.start)} need at least {least}.",
            )
