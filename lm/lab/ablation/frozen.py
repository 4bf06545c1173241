"""A study whose contrasts are frozen as published.

contrasts.csv holds them. The record of such a study may be of any earlier version, and nobody reads it.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from lm.errors import reading
from lm.lab.ablation.contrasts import Contrast
from lm.lab.ablation.record import CONTRASTS, REPORTED, UNUSED, AblationRecord, ArmRecord, Run
from lm.system.files import read_csv


def is_frozen(folder: Path) -> bool:
    return (folder / CONTRASTS).exists()


def read_frozen(folder: Path, rows: Sequence[dict[str, str]]) -> tuple[AblationRecord, list[Contrast], list[Contrast]]:
    """Return the part of a record that a frozen study holds, its contrasts, and those of them that pages show.

    `rows` are those of results.csv. A study may have held several budgets equal: the record has the runs under the
    first, and a page says at each contrast what is held equal. Raises UserError that names contrasts.csv.
    """
    with reading(folder / CONTRASTS):
        cells = read_csv(folder / CONTRASTS)
        contrasts = [_contrast(row) for row in cells]
        pairs = {contrast.arm: contrast.baseline for contrast in contrasts}
        budget = contrasts[0].budget
        asked = [row for row in rows if row["purpose"] != UNUSED]
        runs = [_run(row) for row in asked if row["purpose"] != REPORTED or budget in row["budgets"].split()]
        reported = [run for run in runs if run.purpose == REPORTED]
        arms = dict[str, ArmRecord]()
        for run in reported:
            arms.setdefault(run.arm, ArmRecord(tuned=run.values))
        record = AblationRecord(
            name=folder.resolve().name,
            question=cells[0]["question"],
            arms=arms,
            baseline=next(other for other in pairs.values() if other not in pairs),
            pairs=pairs,
            primary=[arm for arm in pairs if any(row.primary for row in contrasts if row.arm == arm)],
            seeds=sorted({run.seed for run in reported}),
            metric=contrasts[0].metric,
            equivalence_margin=contrasts[0].equivalence_margin or 0.0,
            budget=budget,
            runs=runs,
        )
        pairs_of = zip(contrasts, cells, strict=True)
        return record, contrasts, [_shown(contrast, row["at_equal"]) for contrast, row in pairs_of if row["budgets"]]


def _contrast(cells: dict[str, str]) -> Contrast:
    hints = get_type_hints(Contrast)
    values = {key: _value(cells[key], hints[key]) for key in cells if key in hints}
    weights = {cells["arm"]: 1.0, cells["baseline"]: -1.0}
    return Contrast(**values, weights=weights, sides=(cells["arm"], cells["baseline"]))


def _shown(contrast: Contrast, at_equal: str) -> Contrast:
    """Return the contrast with what is held equal in its words; `at_equal` is empty where a study has one budget."""
    if not at_equal:
        return contrast
    sentence = f"{at_equal.strip().capitalize()}, {contrast.sentence}".replace("flops", "FLOPs")
    return replace(contrast, baseline=f"{contrast.baseline}{at_equal}", sentence=sentence)


def _value(cell: str, kind: Any) -> Any:
    """A cell of contrasts.csv: text, or JSON where the column holds anything else."""
    kinds = get_args(kind) or (kind,)
    if not cell and type(None) in kinds:
        return None
    return cell if str in kinds and not cell.startswith("[") else json.loads(cell)


def _run(cells: dict[str, str]) -> Run:
    values = {key: float(value) for key, value in cells.items() if "." in key and value}
    return Run(
        purpose=cells["purpose"],
        arm=cells["arm"],
        seed=int(cells["seed"]),
        steps=int(cells["steps"] or 0),
        values=values,
        run_dir=cells["run_dir"],
    )
