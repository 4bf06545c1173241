"""Runs as a table and as CSV: which and in what order, what differs between them, and their results."""

import difflib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lm.errors import UserError, require
from lm.lab.runs.find import FoundRun, differing, without_parts_of_the_head
from lm.system.files import csv_text
from lm.system.terminal import format_table, printable, to_override_value

NGRAM = "baselines_bpb.ngram"
SCORES = ("val_loss", "val_bpb")  # behind the name; other results follow the settings
RESULTS = {  # shown, with how many decimals
    **dict.fromkeys((*SCORES, "val_top1", NGRAM), ".4f"),
    **dict.fromkeys(("n_params", "steps", "tokens"), ","),
    "seconds": ",.0f",
}
HEADS = {
    "loss": "loss (setting)",  # plain or chunked, which nobody should take for a score
    NGRAM: "n-gram",  # bits per byte
}
WIDTH = 32  # of a cell; a hash says enough in a quarter of it


def where(runs: Sequence[FoundRun], query: str | None) -> list[FoundRun]:
    """Return the runs that meet a condition of pandas over their settings and results, whose names have _ for each dot.

    Raises UserError with what pandas says of the condition.
    """
    if query is None:
        return list(runs)
    import pandas as pd  # which takes a second

    names = dict.fromkeys([*RESULTS, *(name for run in runs for name in run.names())])
    frame = pd.DataFrame([{name.replace(".", "_"): run[name] for name in names} for run in runs])
    scores = [name.replace(".", "_") for name in RESULTS]
    frame[scores] = frame[scores].astype(float)  # unfinished runs have none
    frame = frame.convert_dtypes()  # a broken run has no settings: they are missing, and meet no condition
    expected = "a condition, as in 'val_loss < 2' or 'optim_lr == 0.01', with _ for each dot of a name"
    try:
        meets = frame.eval(query, engine="python")
    except Exception as error:  # pandas raises what Python's parser and operators raise, among others
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"where={query}: {said}; expected {expected}") from error
    is_condition = isinstance(meets, pd.Series) and pd.api.types.is_bool_dtype(meets) and len(meets) == len(runs)
    require(is_condition, f"where={query}", expected)
    return [run for run, is_met in zip(runs, meets.fillna(value=False), strict=True) if is_met]


def ordered(runs: Sequence[FoundRun], key: str) -> list[FoundRun]:
    """Sort by a setting or result, numbers before text, runs without it last. A minus before `key` means descending.

    Raises UserError for a setting that is equal in all of several runs.
    """
    name = key.removeprefix("-")
    check_key("sort", name, runs)
    values = [str(run[name]) for run in runs if run.settings]
    is_known = any(run[name] is not None for run in runs)  # a result is not, before a run has finished
    if is_known and len(values) > 1 and len({*values}) == 1 and not any(name in run.result for run in runs):
        meant = " or ".join(result for result in RESULTS if name in result)
        hint = f"; did you mean {meant}?" if meant else ""
        raise UserError(f"sort={key}: the setting {name} is {values[0]} in all of these runs{hint}")
    with_value = [run for run in runs if run[name] is not None]

    def rank(run: FoundRun) -> tuple[bool, float, str]:
        value = run[name]
        return (False, value, "") if is_number(value) else (True, 0, to_override_value(value))

    return sorted(with_value, key=rank, reverse=key != name) + [run for run in runs if run[name] is None]


def check_key(option: str, key: str, runs: Sequence[FoundRun]) -> None:
    names = sorted({name for run in runs for name in run.names()})
    if key in names or not any(run.result for run in runs):  # before the first result, its keys are not known
        return
    same = [full for full in names if full.rpartition(".")[2] == key]
    close = same or difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else "; csv=- shows settings and results"
    raise UserError(f"{option}: {key} is neither a setting nor a result of these runs{hint}")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- a table


def listing(runs: Sequence[FoundRun], total: int, width: int | None = None) -> str:
    """Return a table for each text, a line for each run that cannot be read, and how many runs there are of each kind.

    A table has at most `width` columns of the terminal, unless there are none.
    """
    texts: dict[str, list[FoundRun]] = {}
    for run in runs:
        if run.status != "broken":
            texts.setdefault(run.settings["data_hash"], []).append(run)
    lines = []
    for text, own in texts.items():
        if len(texts) > 1:
            fold = own[0]["data.fold"]
            part = "" if fold is None else f"part {fold:g} held out, "
            lines.append(f"the text {own[0]['data.path'] or own[0]['data.source']} ({part}data_hash {text[:8]})")
        lines += [*_table(own, width), ""]
    lines += [printable(" ".join(f"broken: {run.note}".split())) for run in runs if run.status == "broken"]
    counts = ", ".join(f"{n} {kind}" for kind, n in Counter(run.status for run in runs).items())
    total_line = f"{len(runs)} run{'s' * (len(runs) != 1)}" + f" of {total}" * (len(runs) != total)
    return "\n".join([*lines, f"{total_line}{': ' * bool(counts)}{counts}"])


def _table(runs: Sequence[FoundRun], width: int | None) -> list[str]:
    """Return the lines of a table: names, scores, the settings that differ, other results."""
    columns = {"run": [_short(run.name, width and width // 2) for run in runs]}
    if any(run.note for run in runs):
        status = (" ".join(f"{run.status}: {run.note}".rstrip(": ").split()) for run in runs)
        columns["status"] = [_short(cell, width and WIDTH) for cell in status]
    results = {
        key: [format(run.result[key], decimals) if key in run.result else "" for run in runs]
        for key, decimals in RESULTS.items()
    }
    columns |= {key: results[key] for key in SCORES}
    for key in without_parts_of_the_head(differing(runs), runs):
        most = 8 if key.endswith(("_hash", "sha256")) else None
        columns[key] = [_short(to_override_value(run[key])[:most], WIDTH) for run in runs]
    columns |= results
    fitting, left = [], math.inf if width is None else width
    for key, cells in columns.items():
        column = [HEADS.get(key, key), *cells]
        if (size := max(map(len, column)) + 2) <= left + 2:
            fitting.append(column)
            left -= size
    more = len(columns) - len(fitting)
    rows = format_table([*zip(*fitting, strict=True)]).split("\n")
    return [*rows, f"{more} more column{'s' * (more > 1)}: csv=-"] if more else rows


def _short(cell: str, width: int | None) -> str:
    return cell if width is None or len(cell) <= width else f"{cell[: width // 2]}…{cell[1 - width // 2 :]}"


def listing_csv(runs: Sequence[FoundRun]) -> str:
    """Return a row for each run, with every setting that differs and every result that is a number or a text."""
    keys = differing(runs)
    rows = []
    for run in runs:
        results = {key: value for key, value in run.result.items() if isinstance(value, str | int | float)}
        values = {key: run[key] for key in keys if run.settings} | results
        rows.append({"run": printable(run.name), "status": run.status, "note": printable(run.note)} | values)
    columns = ["run", "status", "note", *keys, *RESULTS]
    return csv_text(
        columns, [{key: v if is_number(v) else to_override_value(v) for key, v in row.items()} for row in rows]
    )
