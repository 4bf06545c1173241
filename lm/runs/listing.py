"""Runs as a table and as CSV: what differs between them, and their results."""

from collections import Counter
from collections.abc import Sequence

from lm.runs.find import FoundRun, differing, without_parts_of_the_head
from lm.runs.query import is_number
from lm.system.files import csv_text
from lm.system.terminal import format_table, printable, to_override_value

RESULTS = {  # shown, with how many decimals
    **dict.fromkeys(("val_loss", "val_bpb", "val_top1"), ".4f"),
    **dict.fromkeys(("n_params", "steps", "tokens"), ","),
    "seconds": ",.0f",
}
HEADS = {"loss": "loss (setting)"}  # plain or chunked, which nobody should take for a score
WIDTH = 32  # of a cell; a hash says enough in a quarter of it


def listing(runs: Sequence[FoundRun], total: int) -> str:
    """A row for each run that can be read, a line for each other, and how many there are of each kind."""
    shown = [run for run in runs if run.status != "broken"]
    keys, status = without_parts_of_the_head(differing(shown), shown), any(run.note for run in shown)
    head = ["run", *["status"] * status, *(HEADS.get(key, key) for key in keys), *RESULTS]
    rows = [_row(run, keys, status) for run in shown]
    broken = [printable(" ".join(f"broken: {run.note}".split())) for run in runs if run.status == "broken"]
    counts = ", ".join(f"{n} {kind}" for kind, n in Counter(run.status for run in runs).items())
    total_line = f"{len(runs)} run{'s' * (len(runs) != 1)}" + f" of {total}" * (len(runs) != total)
    table = [format_table([head, *rows]), ""] if rows else []
    return "\n".join([*table, *broken, f"{total_line}{': ' * bool(counts)}{counts}"])


def _row(run: FoundRun, keys: Sequence[str], status: bool) -> list[str]:
    status_text = f"{run.status}: {run.note}" if run.note else run.status
    settings = [to_override_value(run[key])[: 8 if key.endswith(("_hash", "sha256")) else None] for key in keys]
    results = [format(run.result[key], how) if key in run.result else "" for key, how in RESULTS.items()]
    return [run.name, *[" ".join(status_text.split())] * status, *map(_clipped, settings), *results]


def _clipped(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[: WIDTH // 2]}…{text[1 - WIDTH // 2 :]}"


def listing_csv(runs: Sequence[FoundRun]) -> str:
    """A row for each run, with every setting that differs and every result that is a number or a text."""
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
