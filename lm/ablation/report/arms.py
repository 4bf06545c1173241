"""The arms: what is changed in each, what it costs, its results, and how near it comes to what is held equal."""

from collections.abc import Iterable
from statistics import median

from lm.ablation.duration import spell
from lm.ablation.judge.study import Row, Study, spread
from lm.ablation.report.answer import BUDGET_NAMES
from lm.report.page import code, plain, table

FLOPS = (
    "FLOPs are those of matmuls, as torch counts them on the model: for each token 6 for every weight that it is "
    "multiplied by (2 in the forward and 4 in the backward pass; the output matrix counts, looking up an embedding "
    "does not), 12 L d T for the attention of L layers of width d over T tokens, in full, as if no position were "
    "masked, and the share of Muon's orthogonalisation, done once a step. Norms, activations and AdamW do not count."
)


def arms_section(study: Study) -> list[str]:
    record, tuned = study.record, bool(study.trials)
    rows = []
    for name, arm in record.arms.items():
        row = [plain(name), changes(study, name), f"{arm.n_params:,}", f"{arm.flops_per_token:,}"]
        row.append(spent(row for row in study.rows if row.arm == name))
        rows.append(row + [spent(row for row in study.trials if row.arm == name)] * tuned)
    head = ["arm", "changes", "parameters", "FLOPs per token", "time of runs", *["time of search trials"] * tuned]
    common = " ".join(map(code, [*record.common, *record.overrides]))
    return [
        "## Arms",
        table(head, rows),
        "Times are sums over all seeds." + f" Changed in all arms: {common}." * bool(common),
        *reached(study),
        *matches_section(study),
    ]


def changes(study: Study, name: str) -> str:
    """An arm's overrides, and the values that the program has chosen for it."""
    record, arm = study.record, study.record.arms[name]
    found = [" ".join(map(code, arm.words)) or "nothing"]
    for key, value in arm.matched.items():
        found.append(f"{code(f'{key}={value}')} (parameter-matched to {plain(record.contrasts[name])})")
    found += [f"{code(f'{key}={value:g}')} (tuned)" for key, value in arm.tuned.items()]
    if name in record.seed_offsets:
        found.append(f"seeds + {record.seed_offsets[name]}, so that its pairs share no random numbers")
    return "; ".join(found)


def spent(rows: Iterable[Row]) -> str:
    return spell(sum(row.result["seconds"] for row in rows if row.result))


def reached(study: Study) -> list[str]:
    """A row for each arm and budget."""
    if not any(row.result for row in study.rows):
        return []
    many = len(study.record.budgets) > 1
    head = ["arm", *["budget"] * many, "validation loss", "bits per byte", "top-1 %", "seeds", "steps", "tokens"]
    names = study.record.arms
    rows = [reached_row(study, name, budget, many) for budget in study.record.budgets for name in names]
    return [
        "### Final results",
        table([*head, "seconds", "tokens per second"], rows),
        "Mean ± standard deviation over seeds; median seconds and tokens per second.",
    ]


def reached_row(study: Study, name: str, budget: str, many: bool) -> list[str]:
    done, arm = study.finished(name, budget).values(), study.record.arms[name]
    steps = arm.steps[budget]
    row = [plain(name), *[BUDGET_NAMES[budget]] * many]
    for key, scale, digits in (("val_loss", 1, 4), ("val_bpb", 1, 4), ("val_top1", 100, 2)):
        row.append(mean_sd([scale * one.result[key] for one in done], digits))
    row += [f"{len(done)} of {len(study.record.seeds)}", f"{steps:,}", f"{steps * arm.tokens_per_step:,}"]
    for key in ("seconds", "tokens_per_second"):
        row.append(f"{median(one.result[key] for one in done):,.0f}" if done else "-")
    return row


def mean_sd(values: list[float], digits: int) -> str:
    if not values:
        return "-"
    mean, sd = spread(values)
    return f"{mean:.{digits}f}" + (f"\u00a0±\u00a0{sd:.{digits}f}" if len(values) > 1 else "")


def matches_section(study: Study) -> list[str]:
    budgets, pairs = study.record.budgets, study.record.contrasts.items()
    rows = [matches_row(study, arm, other, budget) for budget in budgets for arm, other in pairs]
    head = ["arm", "baseline", "held equal", "parameters", "tokens", "FLOPs", "time"]
    return [
        "### Arm divided by baseline",
        table(head, rows),
        f"Time is the median of the pairs' measured ratios; the others are planned. {FLOPS}{warm_up(study)}",
    ]


def matches_row(study: Study, arm: str, other: str, budget: str) -> list[str]:
    one, two = study.record.arms[arm], study.record.arms[other]
    tokens = [each.steps[budget] * each.tokens_per_step for each in (one, two)]
    flops = [n * each.flops_per_token for n, each in zip(tokens, (one, two), strict=True)]
    planned = [f"{a / b:.4f}" if b else "-" for a, b in ((one.n_params, two.n_params), tokens, flops)]
    measured = ratios_of_time(study, arm, other, budget)
    time = f"{median(measured):.3f}" if measured else "-"
    return [plain(arm), plain(other), BUDGET_NAMES[budget], *planned, time]


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
