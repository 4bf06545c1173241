"""Several ablations side by side: one question under different conditions, each in a folder of its own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, variance
from urllib.parse import quote

from matplotlib.figure import Figure

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.power import Tuning, critical, welch
from lm.ablation.judge.statistics import Comparison, interval
from lm.ablation.judge.study import Study, read_study
from lm.ablation.report.answer import BUDGET_NAMES, primary
from lm.ablation.report.columns import number
from lm.ablation.report.forest import Line, draw_forest, label
from lm.ablation.report.numbers import results
from lm.ablation.report.warnings import warnings_of
from lm.config.identity import identifying
from lm.report.page import code, plain, table
from lm.report.plots import drawing, short
from lm.system.files import make_folder, write_text
from lm.system.table import csv_text

HEAD = (
    *("comparison", "ablation", "verdict", "difference", "95 % CI", "unit", "equivalence margin", "seeds"),
    *("bits per byte", "minus the first row"),
)
CAPTION = (
    "The primary comparisons of each ablation, or all if none is primary. A difference is an arm minus its baseline; "
    "runs that serve two budgets are listed under the first. The figure shows bits per byte, which can be compared "
    "between tokenizers, with 95 % confidence intervals (CI). Verdicts are those of the reports: each has its own unit "
    "and equivalence margin and is corrected within its report only. The last column tells whether the answer depends "
    "on the conditions: the difference in bits per byte minus that of the first row of the same comparison, with "
    "Welch's 95 % CI."
)
DIFFERS = "Settings of the baseline arm, before tuning, that differ from those of the first ablation."


@dataclass(slots=True)
class Shown:
    """A comparison of one ablation, in the unit of its report and in bits per byte."""

    folder: Path
    study: Study
    contrast: Contrast
    bits: Comparison
    differences: list[float]  # in bits per byte, seed by seed
    tuning: Tuning | None  # in bits per byte

    @property
    def heading(self) -> str:
        arms = f"{short(self.contrast.arm)} - {short(self.contrast.baseline)}"
        return f"{arms}, at equal {BUDGET_NAMES[self.contrast.budget]}"


def folders(path: Path) -> list[Path]:
    """Of the ablations in a folder; none if it holds one itself."""
    return [] if (path / "ablation.json").exists() else sorted(one.parent for one in path.glob("*/ablation.json"))


def write_overview(path: Path) -> dict[Path, Study]:
    """Write overview.md, figures/overview.svg and a results.csv of all runs; return the ablations as they began.

    Raises BadInput if what one of the folders holds cannot be read.
    """
    found = {folder: read_study(folder) for folder in folders(path)}
    studies = dict(sorted(found.items(), key=lambda pair: pair[1].record.begun))
    groups: dict[str, list[Shown]] = {}
    for folder, study in studies.items():
        for one in shown(folder, study):
            groups.setdefault(one.heading, []).append(one)
    make_folder(path / "figures")
    write_text(path / "results.csv", all_results(studies))
    write_text(path / "overview.md", overview(path.name, studies, groups))
    if groups:
        write_text(path / "figures" / "overview.svg", forest(groups))
    return studies


def shown(folder: Path, study: Study) -> list[Shown]:
    """The comparisons of losses that have a pair of runs; one whose runs serve two budgets once."""
    found: dict[str, Shown] = {}
    for one in primary(study.contrasts()):
        if not (one.seeds and study.lower_is_better) or one.runs in found:
            continue
        ours, theirs = (study.scores(arm, one.budget, "val_bpb") for arm in (one.arm, one.baseline))
        bits = [ours[seed] - theirs[seed] for seed in one.seeds]
        tuning = one.tuning and in_bits(
            one.tuning, fmean(ours.values()) / fmean(study.scores(one.arm, one.budget).values())
        )
        low, high = interval(bits, tuning=tuning) or (None, None)
        same = replace(one.comparison, mean=fmean(bits), ci_low=low, ci_high=high)
        found[one.runs] = Shown(folder, study, one, same, bits, tuning)
    return list(found.values())


@drawing
def forest(groups: dict[str, list[Shown]]) -> Figure:
    lines = {heading: [Line(one.folder.name, one.bits) for one in group] for heading, group in groups.items()}
    return draw_forest(lines, 0, "difference, bits per byte (left is better)")


def overview(title: str, studies: dict[Path, Study], groups: dict[str, list[Shown]]) -> str:
    everything = [one for group in groups.values() for one in group]
    lines = [f"{one.heading}: {one.folder.name} {label(one.bits)} {one.bits.verdict}" for one in everything]
    alt = plain(f"Differences with their 95 % CI. {'; '.join(lines)}")
    parts = [f"# {plain(title)}", CAPTION]
    if everything:
        parts += [
            f"![{alt}](figures/overview.svg)",
            table(HEAD, [row(one, group[0]) for group in groups.values() for one in group]),
        ]
    if others := conditions(studies):
        parts += ["## Settings that differ", table(["ablation", "settings"], others), DIFFERS]
    if weak := list(weaknesses(studies, everything)):
        parts += ["## What weakens the answers", "\n".join(f"- {one}" for one in weak)]
    return "\n\n".join(parts) + "\n"


def conditions(studies: dict[Path, Study]) -> list[list[str]]:
    """Each ablation's settings that are not those of the first; empty where all are the same."""
    records = {folder: study.record for folder, study in studies.items()}
    settings = {folder: identifying(one.arms[one.baseline].settings) for folder, one in records.items()}
    first, *_ = [*settings.values(), {}]
    others = {
        folder: [f"{key}={value}" for key, value in one.items() if value not in (None, first.get(key))]
        for folder, one in settings.items()
    }
    return [[plain(one.name), " ".join(map(code, said)) or "-"] for one, said in others.items()] * any(others.values())


def row(one: Shown, first: Shown) -> list[str]:
    found, name = one.contrast.comparison, plain(one.folder.name)
    place = f"[{name}]({quote(one.folder.name)}/report.md)" if (one.folder / "report.md").exists() else name
    span = "-" if found.ci_low is None else f"{found.ci_low:+.4f} to {found.ci_high:+.4f}"
    margin = f"{one.study.record.equivalence_margin:g}"
    own = [found.verdict, number(found.mean, "+.4f"), span, one.study.unit, margin, str(found.n)]
    bits = [number(one.bits.mean, "+.4f"), "" if one is first else apart(one, first)]
    return [plain(one.heading), place, *own, *bits]


def in_bits(tuning: Tuning, bits: float) -> Tuning:
    """`bits`: bits per byte for one of the metric, which is the same for all arms of one tokenizer."""
    return replace(tuning, variance=tuning.variance * bits**2)


def apart(one: Shown, first: Shown) -> str:
    """The difference of two means and its 95 % interval (Welch, 1947), the noise of tuning included."""
    mean = fmean(one.differences) - fmean(first.differences)
    if min(len(one.differences), len(first.differences)) < 2:
        return f"{mean:+.4f}"
    parts = [(variance(of.differences) / (n := len(of.differences)), n - 1) for of in (one, first)]
    total, df = welch(*parts, *((of.tuning.variance, of.tuning.df) for of in (one, first) if of.tuning))
    half = critical(0.975, df) * math.sqrt(total)
    return f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]"


def weaknesses(studies: dict[Path, Study], everything: Sequence[Shown]) -> list[str]:
    """What weakens each ablation's answer, and which ablations are not shown."""
    found = []
    for folder, study in studies.items():
        if not any(one.folder == folder for one in everything):
            why = "no pair of runs yet" if study.lower_is_better else f"its metric is {study.metric}"
            found.append(f"**{plain(folder.name)}** is not shown: {why}.")
        else:
            told = warnings_of(study, study.contrasts())
            found += [f"**{plain(folder.name)}:** {plain(f'{head} {meaning}')}" for head, meaning in told]
    return found


def all_results(studies: dict[Path, Study]) -> str:
    """The results.csv of every ablation below each other, with the folder's name before each row."""
    return csv_text(
        ["ablation"], [{"ablation": one.name} | row for one, study in studies.items() for row in results(study)]
    )
