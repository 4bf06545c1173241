"""How near arms come to what is held equal, and what the FLOPs count."""

from statistics import median

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.study import Study
from lm.ablation.report.answer import BUDGET_NAMES
from lm.report.page import code, plain, table

FLOPS = (
    "FLOPs are those of matmuls, as torch counts them on the model: for each token 6 for every weight that it is "
    "multiplied by (2 in the forward and 4 in the backward pass; the output matrix counts, looking up an embedding "
    "does not), 12 L d T for the attention of L layers of width d over T tokens, in full, as if no position were "
    "masked, and the share of Muon's orthogonalisation, done once a step. Norms, activations and AdamW do not count."
)


def matches_section(study: Study) -> list[str]:
    record = study.record
    rows = [row(study, arm, other, budget) for budget in record.budgets for arm, other in record.contrasts.items()]
    head = ["arm", "baseline", "held equal", "parameters", "tokens", "FLOPs", "time"]
    return [
        "### Arm divided by baseline",
        table(head, rows),
        f"Time is the median of the pairs' measured ratios; the others are planned. {FLOPS}{warm_up(study)}",
    ]


def row(study: Study, arm: str, other: str, budget: str) -> list[str]:
    one, two = study.record.arms[arm], study.record.arms[other]
    tokens = [each.steps[budget] * each.tokens_per_step for each in (one, two)]
    flops = [n * each.flops_per_token for n, each in zip(tokens, (one, two), strict=True)]
    planned = [f"{a / b:.4f}" if b else "-" for a, b in ((one.n_params, two.n_params), tokens, flops)]
    measured = ratios_of_time(study, arm, other, budget)
    time = f"{median(measured):.3f}" if measured else "-"
    return [plain(arm), plain(other), BUDGET_NAMES[budget], *planned, time]


def times(study: Study, one: Contrast) -> list[float]:
    return ratios_of_time(study, one.arm, one.baseline, one.budget)


def ratios_of_time(study: Study, arm: str, other: str, budget: str) -> list[float]:
    """By pair, the measured seconds of training of the arm divided by those of the other."""
    ours, theirs = (study.scores(name, budget, "seconds") for name in (arm, other))
    return [ours[seed] / theirs[seed] for seed in ours if theirs.get(seed)]


def warm_up(study: Study) -> str:
    """Where runs differ in length and the warm-up does not."""
    arms, budgets = study.record.arms.values(), study.record.budgets
    steps = sorted({arm.steps[budget] for arm in arms for budget in budgets})
    warm_ups = {arm.settings.get("optim.warmup_steps") for arm in arms} - {None, 0}
    if len(steps) < 2 or not warm_ups:
        return ""
    said = " or ".join(code(f"optim.warmup_steps={one}") for one in sorted(map(str, warm_ups)))
    return f" The warm-up is a fixed number of steps, {said}, in runs of {steps[0]:,} to {steps[-1]:,} steps."
