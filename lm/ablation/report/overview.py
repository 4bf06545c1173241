"""Several ablations side by side: one question under different conditions, each in a folder of its own."""

import csv
import io
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from lm.ablation.report.answer import BUDGETS
from lm.ablation.report.contrasts import number
from lm.ablation.report.forest import Line, draw_forest, label
from lm.ablation.report.page import plain, table
from lm.ablation.report.plots import drawing
from lm.ablation.report.record import results_csv
from lm.ablation.restore import restore
from lm.ablation.statistics import Comparison, interval
from lm.ablation.study import Contrast, Study, read_study
from lm.files import write_text

Shown = dict[str, dict[str, tuple[Contrast, Comparison]]]  # heading -> folder -> in its own unit, in bits per byte


def folders(path: Path) -> list[Path]:
    """Of the ablations in a folder; none if it holds one itself."""
    return [] if (path / "ablation.json").exists() else sorted(one.parent for one in path.glob("*/ablation.json"))


def write_overview(path: Path) -> None:
    """Write overview.md, figures/overview.svg and a results.csv of all runs. The order is that of their beginning."""
    for folder in folders(path):
        restore(folder)
    studies = {folder.name: read_study(folder) for folder in folders(path)}
    studies = dict(sorted(studies.items(), key=lambda pair: str(pair[1].record["begun"])))
    found = shown(studies)
    write_text(path / "results.csv", all_results(studies))
    write_text(path / "overview.md", overview(path.name, studies, found))
    if found:
        (path / "figures").mkdir(exist_ok=True)
        write_text(path / "figures" / "overview.svg", forest(found))


def shown(studies: dict[str, Study]) -> Shown:
    """The primary contrasts of losses that have a pair; one whose runs serve two budgets once."""
    found: Shown = {}
    for name, study in studies.items():
        seen = set()
        for one in study.contrasts():
            pair = (one.arm, one.baseline, *one.differences)
            if one.primary and one.seeds and study.lower_is_better and pair not in seen:
                seen.add(pair)
                heading = f"{one.arm} - {one.baseline}, at equal {BUDGETS[one.budget]}"
                found.setdefault(heading, {})[name] = (one, in_bits(study, one))
    return found


def in_bits(study: Study, one: Contrast) -> Comparison:
    """The same pairs in bits per byte, the one unit that different tokenizers share; the verdict stays."""
    ours, theirs = (study.scores(arm, one.budget, "val_bpb") for arm in (one.arm, one.baseline))
    differences = [ours[seed] - theirs[seed] for seed in one.seeds]
    low, high = interval(differences) or (None, None)
    return replace(one.comparison, mean=sum(differences) / len(differences), ci_low=low, ci_high=high)


@drawing
def forest(found: Shown) -> Figure:
    groups = {heading: [Line(name, bits) for name, (_, bits) in cells.items()] for heading, cells in found.items()}
    return draw_forest(groups, 0, "difference, bits per byte (left is better)")


def overview(title: str, studies: dict[str, Study], found: Shown) -> str:
    head = ["contrast", "where", "seeds", "difference", "95 % interval", "unit", "in bits per byte", "verdict"]
    rows = []
    for heading, cells in found.items():
        for name, (one, bits) in cells.items():
            own = one.comparison
            span = "-" if own.ci_low is None else f"{own.ci_low:+.4f} to {own.ci_high:+.4f}"
            place = f"[{plain(name)}]({name}/report.md)"
            cell = [plain(heading), place, str(own.n), number(own.mean, "+.4f"), span, studies[name].unit]
            rows.append([*cell, number(bits.mean, "+.4f"), own.verdict])
    lines = [
        f"{heading}: {name} {label(bits)}" for heading, cells in found.items() for name, (_, bits) in cells.items()
    ]
    alt = plain(f"Differences with their intervals. {'; '.join(lines)}")
    parts = [f"# {plain(title)}", "The primary contrasts of each ablation. Lines: 95 % intervals."]
    parts += [f"![{alt}](figures/overview.svg)", table(head, rows)] if rows else ["No pair of runs yet."]
    return "\n\n".join(parts) + "\n"


def all_results(studies: dict[str, Study]) -> str:
    """The results.csv of every ablation below each other, with the folder's name before each row."""
    tables = {name: list(csv.DictReader(io.StringIO(results_csv(study)))) for name, study in studies.items()}
    columns = dict.fromkeys(key for rows in tables.values() for row in rows for key in row)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, ["ablation", *columns], restval="", lineterminator="\n")
    writer.writeheader()
    for name, rows in tables.items():
        writer.writerows({"ablation": name} | row for row in rows)
    return buffer.getvalue()
