"""Questions that are asked in series: the ledger, and confirmation on seeds that nobody has seen.

Every comparison that was asked for, and its outcome, is a line of one CSV file in the current folder. Lines are only
added: what a deleted folder has asked counts. Of a hundred useless changes two or three look better by intervals of
95 %, so what was asked beside a discovery belongs to it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import filelock
import pandas as pd
from scipy.special import zeta

from lm.ablation.record import FILE, AblationRecord, question_of, read_record
from lm.ablation.results import Results, read_results
from lm.ablation.statistics import ALPHA
from lm.config import UserError
from lm.config.checks import reading, without_secrets
from lm.report.pages import signed
from lm.system.files import csv_text, json_sha256, read_csv, write_text
from lm.system.terminal import format_table

COLUMNS = (
    *("time", "event", "question", "name", "folder", "arm", "baseline", "budget", "seeds", "tuning_seeds"),
    *("verdict", "difference", "p"),
)
ASKED, ENDED = "asked", "ended"
DECAY = 1.6  # a comparison that is asked later has a smaller share of the error


def read_ledger(path: Path) -> list[dict[str, str]]:
    """The lines of a ledger, none where there is no file. Raises UserError naming it."""
    if not path.exists():
        return []
    with reading(path, "a ledger of ablate"):
        rows = read_csv(path)
        if rows and list(rows[0]) != list(COLUMNS):
            raise UserError(f"has the columns {', '.join(rows[0])}; expected {', '.join(COLUMNS)}")
        return rows


def record_asked(path: Path, record: AblationRecord, folder: Path, is_new: bool) -> str:
    """Add the comparisons that are asked for, unless they are there and the folder goes on with them.

    Returns in words how often they were asked before, elsewhere or in a folder that was deleted; empty if never.
    """
    rows = [_row(ASKED, record, folder, arm, budget) for arm in record.asked() for budget in record.budgets]
    keys = ("event", "question", "arm", "budget")  # of a line of each time that the question was asked
    with _locked(path):
        before = [row for row in read_ledger(path) if all(row[key] == rows[0][key] for key in keys)]
        places = [(row["folder"], row["seeds"]) for row in before]
        if not is_new and (rows[0]["folder"], rows[0]["seeds"]) in places:
            return ""
        _add(path, rows)
    if not is_new:
        before = [row for row in before if row["folder"] != rows[0]["folder"]]
    if not before:
        return ""
    times = f"{len(before)} time{'s' * (len(before) > 1)}"
    return f"this question was asked before: {times}, last in {before[-1]['folder']} at {before[-1]['time']}"


def record_ended(path: Path, results: Results) -> None:
    """Add the outcome of every comparison that was asked for."""
    record, contrasts = results.record, results.contrasts
    contrasts = contrasts[contrasts["family"] != "interaction"].set_index(["arm", "budget"])
    with _locked(path):
        outcomes = []
        for arm in record.asked():
            for budget in record.budgets:
                contrast = contrasts.loc[(arm, budget)]
                numbers = {"difference": contrast["mean_difference"], "p": contrast["p"]}
                shown = {key: "" if pd.isna(value) else repr(float(value)) for key, value in numbers.items()}
                outcomes.append(
                    _row(ENDED, record, results.folder, arm, budget) | {"verdict": contrast["verdict"]} | shown
                )
        _add(path, outcomes)


def folders_of(path: Path) -> set[Path]:
    """Of the ablations of a series."""
    return {Path(row["folder"]).resolve() for row in read_ledger(path)}


def used_seeds(rows: Sequence[dict[str, str]]) -> set[int]:
    """Of reported runs and of trials."""
    return {int(seed) for row in rows for key in ("seeds", "tuning_seeds") for seed in row[key].split()}


def sd_of_pairs(path: Path, results: Results) -> tuple[float, str] | None:
    """The standard deviation of a difference, by the pairs of an ablation or of the last one of its metric that ended.

    Beside it, the folder of the pairs; None if there are none.
    """
    folders = [Path(row["folder"]) for row in read_ledger(path)[::-1] if row["event"] == ENDED]
    others = (read_results(folder) for folder in dict.fromkeys(folders) if (folder / FILE).exists())
    for ablation in chain([results], others):
        sds = ablation.contrasts["sd"].dropna()
        if ablation.record.metric == results.record.metric and len(sds):
            return float(sds.median()), str(ablation.folder)
    return None


def series(rows: Sequence[dict[str, str]]) -> pd.DataFrame:
    """Every comparison that was asked for, in order, with its verdict and that of the series.

    The false discovery rate, the expected share of wrong ones among the verdicts better and worse, is held at ALPHA by
    LOND (Javanmard and Montanari, 2015): the i-th comparison is tested at ALPHA times a share in proportion to
    i**-DECAY, times one more than the discoveries before it. It holds too where p are positively dependent (Zrnic,
    Ramdas and Jordan, 2021), as those of questions that share a baseline. A comparison without an outcome takes its
    place all the same.
    Columns: those of the ledger, `level` (of its test in the series) and `series_verdict`.
    """
    shown, discoveries = list[dict[str, Any]](), 0
    latest = dict[tuple[str, ...], dict[str, Any]]()  # with one name, a folder may be deleted and asked for again
    for row in rows:
        key = tuple(row[name] for name in ("question", "folder", "seeds", "arm", "budget"))
        if row["event"] == ASKED:
            latest[key] = {**row}
            shown.append(latest[key])
        elif key in latest:
            latest[key] |= row
    for i, test in enumerate(shown, start=1):
        test["level"] = float(ALPHA * i**-DECAY / zeta(DECAY) * (discoveries + 1))
        is_called = test["verdict"] in ("better", "worse")
        is_discovery = is_called and float(test["p"]) <= test["level"]
        discoveries += is_discovery
        test["series_verdict"] = "undecided" if is_called and not is_discovery else test["verdict"]
    return pd.DataFrame(shown, columns=[*COLUMNS, "level", "series_verdict"])


def series_table(frame: pd.DataFrame) -> str:
    """The series for a terminal."""
    table = [("", "comparison", "asked in", "seeds", "difference", "p", "verdict", "level", "in the series")]
    for i, row in enumerate(frame.to_dict("records"), start=1):
        has_ended = row["event"] == ENDED
        difference = signed(float(row["difference"]), 4) if row["difference"] else ""
        p = f"{float(row['p']):.2g}" if row["p"] else ""
        own = (row["verdict"], row["series_verdict"]) if has_ended else ("not ended", "")
        arms = f"{row['arm']} - {row['baseline']}"
        n = str(len(row["seeds"].split()))
        table.append((str(i), arms, row["folder"], n, difference, p, own[0], f"{row['level']:.2g}", own[1]))
    found = int((frame["series_verdict"].isin(["better", "worse"])).sum())
    plain = int((frame["verdict"].isin(["better", "worse"])).sum())
    rule = f"of {len(frame)} comparisons {plain} are called better or worse, {found} in the series: LOND holds the"
    return f"{format_table(table)}\n\n{rule} expected share of wrong ones among them at {ALPHA:g}"


def _row(event: str, record: AblationRecord, folder: Path, arm: str, budget: str) -> dict[str, str]:
    """A line without an outcome. `question` is a hash of what decides its runs, but for seeds and code."""
    decides: dict[str, Any] = {
        key: getattr(record, key)
        for key in ("metric", "baseline", "baselines", "budgets", "overrides", "common", "base", "match_parameters")
    }
    arms = {
        name: [own.overrides, {key: value for key, value in own.identity.items() if key != "source_hash"}]
        for name, own in record.arms.items()
    }
    offsets = [0, *record.seed_offsets.values()]
    place = folder.resolve()
    return dict.fromkeys(COLUMNS, "") | {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "event": event,
        "question": json_sha256(decides | {"arms": arms, "tuned": record.tune.trials > 0})[:12],
        "name": record.name,
        "folder": without_secrets(str(place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place)),
        "arm": arm,
        "baseline": record.pairs[arm],
        "budget": budget,
        "seeds": " ".join(str(seed + offset) for offset in offsets for seed in record.seeds),
        "tuning_seeds": " ".join(map(str, record.tune.seeds)) if record.tune.trials else "",
    }


def _locked(path: Path) -> filelock.BaseFileLock:
    """Raises UserError if the folder cannot be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(path.with_name(f".{path.name}.lock"))
    except OSError as error:
        raise UserError(f"ledger={path}: cannot be written to ({error.strerror})") from error


def _add(path: Path, rows: Sequence[dict[str, str]]) -> None:
    write_text(path, csv_text(COLUMNS, [*read_ledger(path), *rows]))


# --- confirmation

FRESH = range(100, 1000)


def confirmation(source: Path, ledger: Sequence[dict[str, str]], output_dir: Path | None = None) -> dict[str, Any]:
    """The content of a question that asks that of the folder `source` anew, with as many seeds.

    Seeds of runs and of trials are the first of 100 to 999 that neither the ledger nor the folder has used; those of a
    confirmation that has begun are its own. Raises UserError if the folder holds no finished ablation.
    """
    record = read_record(source)
    if not record.ended or record.untuned():
        raise UserError(f"confirm={source}: has not ended; the same command as before continues it")
    name = f"{record.name[:32]}-confirm"
    folder = output_dir or Path("ablations") / name
    arms = [*dict.fromkeys(arm for asked in record.asked() for arm in _chain(record, asked))]
    if (folder / FILE).exists():
        begun = read_record(folder)
        seeds, tuning_seeds = begun.seeds, begun.tune.seeds
    else:
        fresh = _fresh(record, used_seeds(ledger))
        try:
            seeds, tuning_seeds = ([next(fresh) for _ in own] for own in (record.seeds, record.tune.seeds))
        except StopIteration:
            raise UserError(f"confirm={source}: too few seeds of 100 to 999 have not been used") from None
    steps = [f"trainer.max_steps={record.fitted['steps']}", "max_tokens=null"] if record.fitted else []
    of_arms = ("baselines", "match_parameters", "seed_offsets")  # keys with a value for each arm
    asked = question_of(record) | {"contrasts": {}, "futility": None, "minutes": None}
    asked |= {key: {arm: value for arm, value in asked[key].items() if arm in arms} for key in of_arms}
    return asked | {
        "name": name,
        "question": f"Confirmation on fresh seeds: {record.question}",
        "arms": {arm: record.arms[arm].overrides for arm in arms},
        "seeds": seeds,
        "tune": asdict(record.tune) | {"seeds": tuning_seeds},
        "base": record.base,
        "overrides": [*record.common, *record.overrides, *steps],
    }


def _chain(record: AblationRecord, arm: str) -> Iterator[str]:
    """The baselines of an arm, the last one first, then the arm."""
    if other := record.pairs.get(arm):
        yield from _chain(record, other)
    yield arm


def _fresh(record: AblationRecord, used: set[int]) -> Iterator[int]:
    """Seeds that are unused, also with the offsets of the arms."""
    taken = used | {*record.seeds, *record.tune.seeds, *(seed for seeds in record.analyses for seed in seeds)}
    offsets = {0, *record.seed_offsets.values()}
    for seed in FRESH:
        own = {seed + offset for offset in offsets}
        if own.isdisjoint(taken):
            taken |= own
            yield seed
