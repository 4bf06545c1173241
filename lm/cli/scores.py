"""What evaluate prints of the scores that it has found."""

from collections.abc import Iterator
from typing import Any

Rows = list[tuple[str, ...]]


def score_table(found: list[dict[str, Any]], several: bool) -> Rows:
    """A row for each score of one text, or several texts side by side, without the details."""
    plain = [{key: value for key, value in one.items() if not isinstance(value, list)} for one in found]
    for one in plain:
        one.pop("frequency_in", None)
    if several:
        return [tuple(plain[0]), *(tuple(map(number, one.values())) for one in plain)]
    return [(key, number(value)) for key, value in plain[0].items() if key not in ("run", "text")]


def detail_tables(found: list[dict[str, Any]], several: bool) -> Iterator[tuple[str, Rows]]:
    for one in found:
        if "ece" not in one:
            continue
        where = f" ({one['run']}, {one['text']})" if several else ""
        bins = [
            (f"{row['from']:.1f} to {row['to']:.1f}", f"{row['confidence']:.4f}", f"{row['accuracy']:.4f}", count(row))
            for row in one["calibration"]
        ]
        yield f"Calibration of the most probable token{where}", [("probability", "mean", "accuracy", "tokens"), *bins]
        bands = [
            (*map(str, (row["band"], row["vocabulary"], f"{row['least']:,} to {row['most']:,}")), *scored(row))
            for row in one["by_frequency"]
        ]
        head = ("band", "vocabulary", f"occurrences in {one['frequency_in']}", "loss", "tokens")
        yield f"Loss by the frequency of the target{where}", [head, *bands]


def scored(row: dict[str, Any]) -> tuple[str, str]:
    return number(row["loss"]), count(row)


def count(row: dict[str, Any]) -> str:
    return f"{row['tokens']:,}"


def number(value: Any) -> str:
    return f"{value:,.4f}" if isinstance(value, float) else "beyond e^700" if value is None else str(value)
