"""Several ablations side by side: one question under different conditions, each in a folder of its own."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from matplotlib.figure import Figure

from lm.ablation.judge.looks import seeds_looked_at
from lm.ablation.judge.study import Study, read_study
from lm.ablation.report.across import Apart, Shown, all_apart, shown
from lm.ablation.report.answer import primary
from lm.ablation.report.columns import number
from lm.ablation.report.forest import Line, draw_forest, label
from lm.ablation.report.numbers import results
from lm.ablation.report.warnings import warnings_of
from lm.ablation.seen import remember
from lm.config.identity import hashed_settings
from lm.report.page import code, plain, table
from lm.report.plots import drawing, short
from lm.system.files import csv_text, write_text
from lm.system.terminal import printable

Groups = dict[tuple[str, str, str], list[Shown]]  # by arm, baseline and budget

HEAD = (
    *("comparison", "ablation", "verdict", "difference", "CI", "unit", "equivalence margin", "seeds"),
    *("bits per byte", "minus the first row", "p (Holm)"),
)
CAPTION = (
    "The primary comparisons of each ablation, or all if none is primary. A difference is an arm minus its baseline; "
    "runs that serve two budgets are listed under the first. The figure shows bits per byte, which can be compared "
    "between tokenizers, with 95 % confidence intervals (CI). Verdicts are those of the reports: each has its own "
    "unit, level and equivalence margin and is corrected within its report only. The last columns tell whether the "
    "answer depends on the conditions: the difference in bits per byte minus that of the first row of the same "
    "comparison, with its 95 % CI, and the p of no such difference, corrected by Holm's method for all rows. The two "
    "are paired by seed where more than half of their seeds are the same; (Welch) marks those that are not."
)
DIFFERS = "Settings of the baseline arm, before tuning, that differ from those of the first ablation."


def folders(path: Path) -> list[Path]:
    """Of the ablations in a folder; none if it holds one itself."""
    inside = sorted(path.iterdir()) if path.is_dir() and not (path / "ablation.json").exists() else ()
    return [one for one in inside if (one / "ablation.json").exists()]  # a closed folder is an error, not so for glob


def write_overview(path: Path) -> dict[Path, Study]:
    """Write overview.md, figures/overview.svg and a results.csv of all runs; return the ablations as they began.

    Raises UserError if what one of the folders holds cannot be read.
    """
    found = {folder: read_study(folder) for folder in folders(path)}
    for folder, study in found.items():
        remember(folder, study.record, seeds_looked_at(study, primary(study.contrasts())))
    studies = dict(sorted(found.items(), key=lambda pair: pair[1].record.begun))
    groups = grouped(one for folder, study in studies.items() for one in shown(folder, study))
    (path / "figures").mkdir(exist_ok=True)
    rows = [{"ablation": printable(folder.name)} | row for folder, study in studies.items() for row in results(study)]
    write_text(path / "results.csv", csv_text(["ablation"], rows))
    write_text(path / "overview.md", overview(path.name, studies, groups))
    if groups:
        write_text(path / "figures" / "overview.svg", forest(groups))
    return studies


def grouped(everything: Iterable[Shown]) -> Groups:
    groups: Groups = {}
    for one in everything:
        groups.setdefault(one.key, []).append(one)
    return groups


@drawing
def forest(groups: Groups) -> Figure:
    lines = [(group[0].heading(short), [Line(one.folder.name, one.bits) for one in group]) for group in groups.values()]
    return draw_forest(lines, 0, "difference, bits per byte (left is better)")


def overview(title: str, studies: dict[Path, Study], groups: Groups) -> str:
    everything, further = [one for group in groups.values() for one in group], all_apart(groups.values())
    lines = [f"{one.heading()}: {one.folder.name} {label(one.bits)} {one.bits.verdict}" for one in everything]
    alt = plain(f"Differences with their 95 % CI. {'; '.join(lines)}")
    parts = [f"# {plain(title)}", CAPTION]
    if everything:
        ci = common_ci(one.study for one in everything)
        rows = [row(one, further.get((one.folder, one.contrast.runs)), ci) for one in everything]
        parts += [f"![{alt}](figures/overview.svg)", table([ci if head == "CI" else head for head in HEAD], rows)]
    if others := conditions(studies):
        parts += ["## Settings that differ", table(["ablation", "settings"], others), DIFFERS]
    if weak := [*weaknesses(studies, everything)]:
        parts += ["## What weakens the answers", "\n".join(f"- {one}" for one in weak)]
    return ("\n\n".join(parts) + "\n").encode(errors="replace").decode()  # the name of a folder may not be UTF-8


def conditions(studies: dict[Path, Study]) -> list[list[str]]:
    """Each ablation's settings that are not those of the first; empty where all are the same."""
    records = {folder: study.record for folder, study in studies.items()}
    settings = {folder: hashed_settings(one.arms[one.baseline].settings) for folder, one in records.items()}
    first, *_ = [*settings.values(), {}]
    others = {
        folder: [f"{key}={value}" for key, value in one.items() if value not in (None, first.get(key))]
        for folder, one in settings.items()
    }
    return [[plain(one.name), " ".join(map(code, said)) or "-"] for one, said in others.items()] * any(others.values())


def common_ci(studies: Iterable[Study]) -> str:
    """The heading of intervals: with their level if all have the same."""
    found = {one.ci for one in studies}
    return found.pop() if len(found) == 1 else "CI"


def row(one: Shown, further: Apart | None, ci: str) -> list[str]:
    found, name = one.contrast.comparison, plain(one.folder.name)
    address = f"{quote(os.fsencode(one.folder.name))}/report.md"
    place = f"[{name}]({address})" if (one.folder / "report.md").exists() else name
    span = "-" if found.ci_low is None else f"{found.ci_low:+.4f} to {found.ci_high:+.4f}"
    span += f" ({one.study.ci})" * (found.ci_low is not None and ci != one.study.ci)
    margin = f"{one.study.record.equivalence_margin:g}"
    own = [found.verdict, number(found.mean, "+.4f"), span, one.study.unit, margin, str(found.n)]
    bits = [number(one.bits.mean, "+.4f"), *(("", "") if further is None else said(further))]
    return [plain(one.heading()), place, *own, *bits]


def said(further: Apart) -> tuple[str, str]:
    span = "" if further.low is None else f" [{further.low:+.4f}, {further.high:+.4f}]"
    return f"{further.mean:+.4f}{span}{'' if further.by_seed else ' (Welch)'}", number(further.p_adjusted, ".3f")


def weaknesses(studies: dict[Path, Study], everything: Sequence[Shown]) -> Iterator[str]:
    """What weakens each ablation's answer, and which ablations are not shown."""
    for folder, study in studies.items():
        if any(one.folder == folder for one in everything):
            told = warnings_of(study, study.contrasts())
            yield from (f"**{plain(folder.name)}:** {plain(f'{head} {meaning}')}" for head, meaning in told)
        else:
            why = "no pair of runs yet" if study.lower_is_better else f"its metric is {study.metric}"
            yield f"**{plain(folder.name)}** is not shown: {why}."
