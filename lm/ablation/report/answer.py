"""The head of a report: the question, the verdicts, and what they rest on."""

from collections.abc import Sequence
from statistics import fmean

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.looks import saved
from lm.ablation.judge.sentence import decimals
from lm.ablation.judge.study import Study
from lm.ablation.record import AblationRecord
from lm.report.page import code, plain

BUDGET_NAMES = {"tokens": "tokens", "flops": "FLOPs", "time": "time"}
METRIC_NAMES = {
    "val_loss": "validation loss, nats per token",
    "val_bpb": "validation loss, bits per byte",
    "val_top1": "next-token accuracy on the validation text",
}
HELD_EQUAL = {
    "tokens": "training tokens",
    "flops": "training FLOPs (within 2 %)",
    "time": "training time (planned from steps of each arm measured in turns; the ratios reached are among the arms)",
}


def answer(study: Study, contrasts: Sequence[Contrast]) -> list[str]:
    """The title, and the verdicts as a quotation."""
    said = [line.partition(":") for line in sentences(study, asked_about(study, contrasts))]
    lines = [f"{'- ' * (len(said) > 1)}**{plain(head + colon)}** {plain(rest)}" for head, colon, rest in said]
    lines = ["**Results so far:**", "", *lines] if study.counts()["missing"] else lines
    return [f"# {plain(study.record.question)}", "\n".join(f"> {line}".rstrip() for line in lines)]


def primary(contrasts: Sequence[Contrast]) -> list[Contrast]:
    """Those that answer the question; all of them where none was named."""
    return [one for one in contrasts if one.primary] or list(contrasts)


def asked_about(study: Study, contrasts: Sequence[Contrast]) -> list[Contrast]:
    """All that a sentence of the answer is about: the primary comparisons and the interactions."""
    return [*primary(contrasts), *study.interactions()]


def sentences(study: Study, asked: Sequence[Contrast]) -> list[str]:
    """A verdict that is the same under several budgets, as that of the same runs is, is said once."""
    found: dict[str, list[str]] = {}
    for one in asked:
        found.setdefault(study.say(one), []).append(BUDGET_NAMES[one.budget])
    many = len(study.record.budgets) > 1
    return [f"At equal {' and '.join(budgets)}, {words}" if many else words for words, budgets in found.items()]


def others(study: Study, contrasts: Sequence[Contrast]) -> str:
    """What is decided about the comparisons that are not primary, under the first budget."""
    main, budget = primary(contrasts), study.record.budgets[0]
    digits, where = decimals(study.record.equivalence_margin), f" at equal {BUDGET_NAMES[budget]}"
    found = [
        f"{one.arm} is {one.comparison.verdict} {'to' if one.comparison.verdict == 'equivalent' else 'than'} "
        f"{one.baseline} ({reason(one, digits)})"
        for one in contrasts
        if one not in main and one.budget == budget and one.comparison.verdict != "undecided"
    ]
    return plain(f"Other comparisons{where * (len(study.record.budgets) > 1)}: {'; '.join(found)}.") if found else ""


def reason(one: Contrast, digits: int) -> str:
    """What a verdict rests on, in short."""
    return "by divergence" if one.comparison.by_divergence else f"{one.comparison.mean:+z.{digits}f}"


def basis(study: Study, contrasts: Sequence[Contrast]) -> list[str]:
    """What the answer rests on, and the other comparisons."""
    record, n_rows, n = study.record, study.rows_alone(), len(study.record.seeds)
    most = "up to " if n > 1 and study.counts()["done"] < len(study.rows) else ""
    equal = ", and in other runs at equal ".join(HELD_EQUAL[budget] for budget in record.budgets)
    matched = "".join(f"{plain(arm)} is parameter-matched by {key}. " for arm, key in record.match_parameters.items())
    text = (
        f"Each arm has {most}{n} seed{'s' * (n > 1)}; {start(record)} The "
        f"metric is the {METRIC_NAMES[study.metric]}; {'lower' if study.lower_is_better else 'higher'} is better. The "
        "equivalence margin, the smallest difference that matters, is "
        f"{record.equivalence_margin:g}. Arms are compared at equal {equal}. {matched}"
        f"{tuned(record)} {counted(contrasts)}"
    )
    alone = f" For {n_rows} of {len(study.rows)} runs, results.csv is all that is left." * bool(n_rows)
    if stop := saved(study):
        alone = f" The ablation was {stop}.{alone}"
    return [text + alone, others(study, contrasts)]


def start(record: AblationRecord) -> str:
    """What a seed sets, and so what the intervals cover."""
    if record.base is not None:
        losses = [one.val_loss for one in record.bases if one.seed in record.seeds and one.val_loss is not None]
        reached = f", with a mean validation loss of {fmean(losses):.4f}" if losses else ""
        return (
            f"all runs of a seed start from one trained model ({' '.join(map(code, record.base))}{reached}), which has "
            "the same seed, so that intervals cover the differences between such models. A seed also sets the order of "
            "the data."
        )
    loaded = {(arm.settings.get("init_from"), arm.settings.get("init_sha256")) for arm in record.arms.values()}
    if len(loaded) == 1 and (one := loaded.pop())[0]:
        return (
            f"all runs start from one given model ({code(str(one[0]))}, weights {code(str(one[1])[:16])}): verdicts "
            "and intervals hold for that model alone. A seed sets the order of the data."
        )
    return "a seed sets the initialisation and the order of the data."


def tuned(record: AblationRecord) -> str:
    if not record.tune.trials:
        return "No hyperparameter was tuned: each arm uses the values of its configuration."
    made = {len(search.trials) for search in record.searches.values()} or {record.tune.trials}
    number = " to ".join(dict.fromkeys(map(str, (min(made), max(made)))))
    under = f" at equal {BUDGET_NAMES[record.budgets[0]]}" * (len(record.budgets) > 1)
    seeds = f"seed{'s' * (len(record.tune.seeds) > 1)} {', '.join(map(str, record.tune.seeds))}"
    return (
        f"The hyperparameters of each arm were tuned separately{under}, in {number} search trials on {seeds}; results "
        "use other seeds, but the same validation text."
    )


def counted(contrasts: Sequence[Contrast]) -> str:
    """What the intervals, and so the verdicts, cover."""
    noise = [one.comparison.tuning_sd for one in contrasts if one.tuning]
    if not noise:
        return "The confidence intervals count the seeds only."
    sizes = " to ".join(dict.fromkeys(f"{sd:.2g}" for sd in (min(noise), max(noise))))
    most = "" if len(noise) == len(contrasts) else ", where there are enough search trials,"
    return (
        f"The confidence intervals count the seeds and{most} that each arm's settings may not be "
        f"its best (standard deviation {sizes}, from the noise of the search trials)."
    )
