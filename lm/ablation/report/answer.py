"""The head of a report: the question, its answer in words that need no training, and what the answer rests on."""

from collections.abc import Sequence
from itertools import groupby

from lm.ablation.judge.sentence import decimals
from lm.ablation.judge.study import Contrast, Study
from lm.ablation.record import AblationRecord
from lm.ablation.report.page import plain

BUDGET_NAMES = {"tokens": "tokens", "flops": "FLOPs", "time": "time"}
METRIC_NAMES = {
    "val_loss": "validation loss",
    "val_bpb": "size of the text, compressed",
    "val_top1": "next-token accuracy",
}
HELD_EQUAL = {
    "tokens": "training tokens",
    "flops": "training FLOPs (what differs by less than 2 % counts as equal)",
    "time": "training time (planned from the measured cost of a step; what differs by less than 2 % counts as equal)",
}
MOST = 6  # sentences in the answer; the table has all


def answer(study: Study, contrasts: Sequence[Contrast]) -> list[str]:
    """The title, and the answer as a quotation."""
    asked = primary(contrasts)
    short = dict.fromkeys(short_answer(asked, one.arm) for one in asked)
    said = sentences(study, [one for one in asked if one.seeds])
    if said and study.counts()["missing"]:
        short = {"So far:": None} | short
    lines = "  \n".join(f"**{plain(line)}**" for line in short).splitlines()
    if 0 < len(said) <= MOST:
        lines += ["", *(f"{'- ' * (len(said) > 1)}{plain(line)}" for line in said)]
    if others := beside(study, [one for one in contrasts if one not in asked]):
        lines += ["", plain(others)]
    return [f"# {plain(study.record.question)}", "\n".join(f"> {line}" if line else ">" for line in lines)]


def primary(contrasts: Sequence[Contrast]) -> list[Contrast]:
    """Those that answer the question; all of them where none was named."""
    return [one for one in contrasts if one.primary] or list(contrasts)


def sentences(study: Study, asked: Sequence[Contrast]) -> list[str]:
    found = [(one.budget, study.say(one)) for one in asked]
    many = len(study.record.budgets) > 1
    return [f"At equal {BUDGET_NAMES[budget]}: {words}" if many else words for budget, words in found]


def short_answer(asked: Sequence[Contrast], arm: str) -> str:
    """One line for an arm: who wins, and where there are several budgets, under which."""
    found = [(who_wins(one), BUDGET_NAMES[one.budget]) for one in asked if one.arm == arm]
    if len(found) == 1 or not any(one.seeds for one in asked):
        return f"{found[0][0]}."
    groups = groupby(found, key=lambda pair: pair[0])
    line = "; ".join(f"at equal {' and '.join(budget for _, budget in group)}, {words}" for words, group in groups)
    return f"{line[0].upper()}{line[1:]}."


def beside(study: Study, others: Sequence[Contrast]) -> str:
    """The other arms in a line: what is decided about them, under the first budget."""
    budget = study.record.budgets[0]
    others = [one for one in others if one.budget == budget]
    digits = decimals(study.record.equivalence_margin)
    found = [
        f"{one.arm} {one.comparison.verdict} than {one.baseline} by {abs(one.comparison.mean or 0):.{digits}f}"
        for one in others
        if one.comparison.verdict in ("better", "worse")
    ]
    found += [f"{one.arm} equivalent to {one.baseline}" for one in others if one.comparison.verdict == "equivalent"]
    where = f" (at equal {BUDGET_NAMES[budget]})" * (len(study.record.budgets) > 1)
    return f"Beside the question{where}: {'; '.join(found)}." if found else ""


def who_wins(one: Contrast) -> str:
    if not one.seeds:
        return f"{one.arm} or {one.baseline}: no answer yet"
    return {
        "better": f"{one.arm} beats {one.baseline}",
        "worse": f"{one.baseline} beats {one.arm}",
        "equivalent": f"{one.arm} and {one.baseline} do equally well",
        "undecided": f"{one.arm} or {one.baseline}: not decided",
    }[one.comparison.verdict]


def basis(study: Study) -> list[str]:
    """What the answer rests on, in one paragraph."""
    record, n_rows = study.record, study.rows_alone()
    n, budgets = len(record.seeds), record.budgets
    seeds = f"{n} seeds for each arm (repetitions with another start and order of the data)" if n > 1 else "one seed"
    seeds = f"up to {seeds}" if n > 1 and study.counts()["done"] < len(study.rows) else seeds
    equal = "; ".join(HELD_EQUAL[budget] for budget in budgets) + ", each in runs of its own" * (len(budgets) > 1)
    matched = ", ".join(f"{arm} by {key}" for arm, key in record.match_parameters.items())
    return [
        f"Based on {seeds}. Measured: {metric_name(study)}; {'less' if study.lower_is_better else 'more'} is better, "
        f"and {record.equivalence_margin:g} or more matters. Held equal: {equal}"
        + (f"; parameters ({plain(matched)})" if matched else "")
        + f". {tuned(record)}"
        + f" {n_rows} of {len(study.rows)} runs are rows of results.csv without their folder." * bool(n_rows)
    ]


def metric_name(study: Study) -> str:
    return f"{METRIC_NAMES[study.metric]} ({study.unit})"


def tuned(record: AblationRecord) -> str:
    if not record.tune.trials:
        return "Nothing was tuned: each arm runs as its configuration stands."
    made = {len(search.trials) for search in record.searches.values()} or {record.tune.trials}
    number = " to ".join(dict.fromkeys(map(str, (min(made), max(made)))))
    seeds = record.tune.seeds
    named = f"{', '.join(map(str, seeds))}, not among those reported"
    under = f" at equal {BUDGET_NAMES[record.budgets[0]]}" * (len(record.budgets) > 1)
    return (
        f"Each arm was tuned on its own{under}, in {number} trials, on {len(seeds)} seed{'s' * (len(seeds) > 1)} "
        f"({named}; the text that scored the trials is the one that scores the arms)."
    )
