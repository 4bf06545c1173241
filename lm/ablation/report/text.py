"""Samples: each arm's greedy continuation of the same prompts, and where it differs from its baseline's."""

import re
from itertools import takewhile

from lm.ablation.judge.study import Row, Study
from lm.report.page import HERE, fence, plain

Samples = dict[str, dict[str, str]]  # arm -> prompt -> continuation


def text_section(study: Study) -> list[str]:
    rows = first_finished(study)
    samples = {arm: {one["prompt"]: one["continuation"] for one in row.result["samples"]} for arm, row in rows.items()}
    prompts = list(dict.fromkeys(prompt for one in samples.values() for prompt in one))
    asked = (arm for arm, one in study.record.arms.items() if one.settings.get("prompts") != [])
    gone = ", ".join(arm for arm in asked if arm in rows and rows[arm].row)
    lost = f"Of the runs of {plain(gone)} results.csv is all that is left, and it holds no samples."
    if not prompts:
        return ["## Samples", lost] if gone else []
    seed = next(iter(rows.values())).seed
    parts = [
        "## Samples",
        f"Greedy continuations at the end of training, seed {seed}. {HERE} marks the first difference from the "
        "baseline's text; ⏎ 9 stands for nine line breaks. Samples illustrate the models; no verdict rests on them.",
        lost if gone else "",
    ]
    for i, prompt in enumerate(prompts, 1):
        parts += [f"### Prompt {i}", fence(few_lines(prompt))]
        for arm in samples:
            if prompt in samples[arm]:
                parts += continuation(study, samples, arm, prompt)
    return parts


def first_finished(study: Study) -> dict[str, Row]:
    """The runs of the first seed that all arms have finished, of those for which the most have their folder."""
    finished = {arm: study.finished(arm, study.record.budgets[0]) for arm in study.record.arms}
    seeds = [seed for seed in study.record.seeds if all(seed in runs for runs in finished.values())]
    found = [{arm: runs[seed] for arm, runs in finished.items()} for seed in seeds]
    return min(found, key=lambda rows: sum(row.row is not None for row in rows.values()), default={})


def continuation(study: Study, samples: Samples, arm: str, prompt: str) -> list[str]:
    ours, other = samples[arm][prompt], study.record.contrasts.get(arm)
    theirs = samples[other].get(prompt) if other else None
    if other is None or theirs is None:
        return [f"**{plain(arm)}**:", fence(few_lines(ours))]
    if ours == theirs:
        return [f"**{plain(arm)}**: the same as {plain(other)}."]
    n = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))))
    alike = f"the same as {plain(other)} for {n} character{'s' * (n > 1)}, then:"
    said = alike if n else f"differs from {plain(other)} from the first character:"
    return [f"**{plain(arm)}**: {said}", fence(few_lines(ours[:n] + HERE + ours[n:]))]


def few_lines(text: str) -> str:
    """Barely trained models write empty lines by the dozen.

    >>> few_lines("a" + 40 * "\\n")
    'a\\n⏎ 40\\n'
    """
    return re.sub(r"\n{5,}", lambda run: f"\n⏎ {len(run[0])}\n", text)
