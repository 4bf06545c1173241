"""Questions that are asked in series: the ledger, and confirmation on seeds that nobody has seen.

Every comparison that was asked for, and its outcome, is a line of one CSV file in the current folder. Lines are only
added: what a deleted folder has asked counts. Of a hundred useless changes two or three look better by intervals of
95 %, so what was asked beside a discovery belongs to it.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import filelock
import pandas as pd
from scipy.special import zeta

from lm.config import UserError
from lm.config.checks import reading
from lm.config.identity import config_hash
from lm.lab.ablation.plan import Plan
from lm.lab.ablation.record import REPORTED
from lm.lab.ablation.results import Results, read_results
from lm.lab.ablation.settings import BUDGET_NAMES, weighted_sum
from lm.lab.ablation.statistics import ALPHA
from lm.system.files import csv_text, json_sha256, read_csv, write_text
from lm.system.terminal import format_table, signed

OUTCOME = ("pairs", "verdict", "difference", "p")
COLUMNS = (
    *("time", "event", "comparison", "question", "name", "folder", "arm", "baseline", "budget"),
    *("seeds", "tuning_seeds", *OUTCOME),
)
ASKED, ENDED = "asked", "ended"
DECAY = 1.6  # a comparison that is asked later has a smaller share of the error


def read_ledger(path: Path) -> list[dict[str, str]]:
    """The lines of a ledger, none where there is no file. Raises UserError naming it.

    In the file a folder is relative to that of the ledger, here to the current one.
    """
    if not path.exists():
        return []
    with reading(path, "a ledger of ablate"):
        rows = read_csv(path)
        if rows and list(rows[0]) != list(COLUMNS):
            raise UserError(f"has the columns {', '.join(rows[0])}; expected {', '.join(COLUMNS)}, or ledger=FILE")
        return [row | {"folder": os.path.relpath(path.parent / row["folder"])} for row in rows]


def asked_before(path: Path, plan: Plan, is_new: bool, confirmed: str | None = None) -> str:
    """In words, how often the question was asked before; empty if it was not.

    If its folder is not new, or nothing had ended there, that is before it was asked there. A confirmation, whose seeds
    are fresh, counts other confirmations alone, but for the one that it confirms.
    """
    lines, source = _lines(plan), confirmed and os.path.relpath(confirmed)
    questions, folder = {line["question"] for line in lines}, lines[0]["folder"]
    ledger = read_ledger(path)
    rows = [row for row in ledger if row["event"] == ASKED and row["question"] in questions]
    if not is_new:
        rows = [*takewhile(lambda row: row["folder"] != folder, rows)]
    elif not any(row["event"] == ENDED and row["folder"] == folder for row in ledger):
        rows = [row for row in rows if row["folder"] != folder]
    if confirmed:
        rows = [row for row in rows if row["name"].endswith("-confirm") and row["folder"] != source]
    times = {(row["time"], row["folder"]) for row in rows}  # an asking may have several comparisons
    return f"{len(times)} time{'s' * (len(times) > 1)}, last in {rows[-1]['folder']}" if times else ""


def record_asked(path: Path, plan: Plan) -> None:
    """Add the comparisons that are asked for in the folder of the plan and are not there."""
    with _locked(path):
        rows = read_ledger(path)
        recorded = {(row["comparison"], row["folder"]) for row in rows}
        if added := [line for line in _lines(plan) if (line["comparison"], line["folder"]) not in recorded]:
            _write(path, [*rows, *added])


def record_ended(path: Path, plan: Plan, results: Results) -> None:
    """Add the outcome of every comparison whose runs have all ended. A comparison is known by its runs.

    The p is that of one look: where several are planned, it is multiplied by their number (Bonferroni). A verdict that
    was seen, or the same pairs under another analysis, such as without looks, make no p smaller.
    """
    contrasts = {(contrast.arm, contrast.budget): contrast for contrast in results.contrasts}
    outcomes = []
    for line in _lines(plan):
        contrast = contrasts[line["arm"], line["budget"]]
        if min(contrast.ended.values()) < contrast.n_planned:
            continue
        numbers = (contrast.mean_difference, contrast.p and min(contrast.p * ALPHA / contrast.alpha, 1.0))
        shown = ["" if value is None else repr(float(value)) for value in numbers]
        outcome = (str(contrast.n_seeds), contrast.verdict, *shown)
        outcomes.append(line | {"event": ENDED} | dict(zip(OUTCOME, outcome, strict=True)))
    with _locked(path):
        rows = read_ledger(path)
        latest = {row["comparison"]: row for row in rows if row["event"] == ENDED}
        for line in outcomes:
            before = latest.get(line["comparison"], dict.fromkeys(OUTCOME, "") | {"pairs": "0"})
            if before["verdict"] != "undecided" or before["pairs"] == line["pairs"]:
                line["p"] = max(line["p"], before["p"], key=lambda p: float(p or 0))
            if int(line["pairs"]) >= int(before["pairs"]) and any(line[key] != before[key] for key in OUTCOME):
                rows.append(line)
        _write(path, rows)


def sd_of_pairs(path: Path, results: Results) -> tuple[float, str] | None:
    """The standard deviation of a difference, by the pairs of an ablation or of the last one of its metric that ended.

    Beside it, the folder of the pairs; None if there are none.
    """
    ended = dict.fromkeys(row["folder"] for row in reversed(read_ledger(path)) if row["event"] == ENDED)
    for folder in (None, *ended):
        with suppress(UserError):  # of one that is gone or damaged
            ablation = results if folder is None else read_results(Path(folder))
            pairs = (contrast for contrast in ablation.contrasts if contrast.family != "interaction")
            sds = [contrast.sd for contrast in pairs if contrast.sd is not None]
            if ablation.record.metric == results.record.metric and sds:
                return median(sds), str(ablation.folder)
    return None


def series(rows: Sequence[dict[str, str]]) -> pd.DataFrame:
    """Every comparison that was asked for, in order, with its latest verdict and that of the series.

    The false discovery rate, the expected share of wrong ones among the verdicts better and worse, is held at ALPHA by
    LOND (Javanmard and Montanari, 2015): the i-th comparison is tested at ALPHA times a share in proportion to
    i**-DECAY, times one more than the discoveries before it. It holds too where p are positively dependent (Zrnic,
    Ramdas and Jordan, 2021), as those of questions that share a baseline. A comparison without an outcome takes its
    place all the same.
    Columns: those of the ledger, `level` (of its test in the series) and `series_verdict`; None is not known yet.
    """
    latest = dict[str, dict[str, Any]]()
    for row in rows:
        if row["event"] == ENDED or row["comparison"] not in latest:  # it may be asked again elsewhere
            latest[row["comparison"]] = latest.get(row["comparison"], {}) | row
    discoveries = set[str]()  # questions: one that is asked again, with further seeds, is discovered once
    for i, test in enumerate(latest.values(), start=1):
        test["level"] = float(ALPHA * i**-DECAY / zeta(DECAY) * (len(discoveries) + 1))
        is_called = test["verdict"] in ("better", "worse")
        is_discovery = is_called and float(test["p"]) <= test["level"]
        discoveries |= {test["question"]} if is_discovery else set()
        test["series_verdict"] = "undecided" if is_called and not is_discovery else test["verdict"]
        test |= {key: [*map(int, test[key].split())] for key in ("seeds", "tuning_seeds")}
        kinds = {"pairs": int, "difference": float, "p": float, "verdict": str, "series_verdict": str}
        test |= {key: kind(test[key]) if test[key] else None for key, kind in kinds.items()}
    return pd.DataFrame([*latest.values()], columns=[*COLUMNS, "level", "series_verdict"], dtype=object)


def series_table(frame: pd.DataFrame) -> str:
    """The series for a terminal."""
    table = [("", "comparison", "asked in", "seeds", "difference", "p", "verdict", "level", "in the series")]
    for i, row in enumerate(frame.to_dict("records"), start=1):
        difference = "" if row["difference"] is None else signed(row["difference"], 4)
        p = "" if row["p"] is None else f"{row['p']:.2g}"
        name = f"{row['arm']}{': ' if ' ' in row['baseline'] else ' - '}{row['baseline']}"  # of a sum its formula
        name += f" at equal {BUDGET_NAMES[row['budget']]}" if len({*frame["budget"]}) > 1 else ""
        verdict, of_series = row["verdict"] or "not ended", row["series_verdict"] or ""
        numbers = (str(row["pairs"]), difference, p)
        table.append((str(i), name, row["folder"], *numbers, verdict, f"{row['level']:.2g}", of_series))
    in_series = int((frame["series_verdict"].isin(["better", "worse"])).sum())
    alone = int((frame["verdict"].isin(["better", "worse"])).sum())
    rule = f"of {len(frame)} comparisons {alone} are called better or worse, {in_series} in the series: LOND holds the"
    return f"{format_table(table)}\n\n{rule} expected share of wrong ones among them at {ALPHA:g}"


def _lines(plan: Plan) -> list[dict[str, str]]:
    """A line without an outcome for each comparison that is asked for; under budgets of equal runs it is one.

    `comparison` is a hash of its runs before tuning, with their seeds and code, and of the tuning; `question` is one of
    what they train on and how, whatever the seeds and the code. How either is written makes no difference.
    """
    config, record, lines = plan.config, plan.record, dict[str, dict[str, str]]()
    sums = {arm: {arm: 1.0, record.pairs[arm]: -1.0} for arm in record.asked()} | config.contrasts
    tuning, time = asdict(config.tune) if config.tune.trials else None, datetime.now(UTC).isoformat(timespec="seconds")
    for (name, weights), budget in ((item, budget) for item in sums.items() for budget in config.budgets):
        runs, kinds, seeds = [], [], dict[int, None]()
        for arm, weight in weights.items():
            specs = [plan.spec(REPORTED, plan.arms[arm], seed, budget, {}) for seed in config.seeds]
            runs.append((weight, sorted(spec.run_dir.rpartition("-")[2] for spec in specs)))
            texts = [specs[0].identity[key] for key in ("data_hash", "tokenizer_hash")]
            kinds.append((weight, config_hash(replace(specs[0].run, seed=0), *texts)))
            seeds |= {spec.run.seed: None for spec in specs}
        about: list[Any] = [config.metric, config_hash(replace(plan.base.run, seed=0)) if plan.base else None]
        comparison = json_sha256([*about, tuning, _canonical(runs)])[:12]
        line = {
            "time": time,
            "event": ASKED,
            "comparison": comparison,
            "question": json_sha256([*about, bool(tuning), _canonical(kinds)])[:12],
            "name": record.name,
            "folder": os.path.relpath(plan.reader.folder),
            "arm": name,
            "baseline": record.pairs[name] if name in plan.arms else weighted_sum(weights),
            "budget": budget,
            "pairs": str(len(config.seeds)),
            "seeds": " ".join(map(str, seeds)),
            "tuning_seeds": " ".join(map(str, config.tune.seeds)) if tuning else "",
        }
        lines.setdefault(comparison, dict.fromkeys(COLUMNS, "") | line)
    return [*lines.values()]


def _canonical(terms: Sequence[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """The terms of a sum in one order and at one scale, the same for the sum of opposite sign.

    >>> _canonical([(-2, "b"), (2, "a")]) == _canonical([(1.0, "b"), (-1.0, "a")])
    True
    """
    scale = max(abs(weight) for weight, _ in terms)
    return min(sorted((sign * weight / scale, term) for weight, term in terms) for sign in (1, -1))


def _locked(path: Path) -> filelock.BaseFileLock:
    """Raises UserError if the folder cannot be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(path.with_name(f".{path.name}.lock"))
    except OSError as error:
        raise UserError(f"ledger={path}: cannot be written to ({error.strerror})") from error


def _write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    write_text(path, csv_text(COLUMNS, [row | {"folder": os.path.relpath(row["folder"], path.parent)} for row in rows]))
