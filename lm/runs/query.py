"""Which runs are shown, and in which order: conditions such as val_loss<3.1, and a key to sort by."""

import difflib
import operator
import re
from collections.abc import Sequence
from typing import Any

from lm.config import UserError
from lm.runs.find import FoundRun
from lm.system.terminal import to_override_value

CONDITION = re.compile(r"\s*([\w.-]+)\s*(==|!=|<=|>=|=|<|>)\s*(.*?)\s*", re.DOTALL)
NEXT = re.compile(r",(?=\s*[\w.-]+\s*(?:[!=]=|[<>=]))")  # a comma before a condition; others belong to a value
ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def where(runs: Sequence[FoundRun], conditions: str | None) -> list[FoundRun]:
    """The runs that meet all of the conditions, which are separated by commas. Raises UserError naming a wrong one.

    A run without a value meets a condition on it only if that says `=null`, or `!=` something else.
    """
    matching = list(runs)
    for condition in NEXT.split(conditions) if conditions else ():
        if not (parts := CONDITION.fullmatch(condition)) or not parts[3]:
            raise UserError(f"where={condition.strip()}: expected a condition such as head.name=tied or val_loss<3.1")
        key, sign, wanted = parts.groups()
        check_key("where", key, runs)
        if sign in ORDER:
            try:
                least = float(wanted)
            except ValueError:
                raise UserError(f"where={condition.strip()}: {wanted} is no number") from None
            matching = [run for run in matching if is_number(run[key]) and ORDER[sign](run[key], least)]
        else:
            matching = [run for run in matching if _equal(run[key], wanted) != (sign == "!=")]
    return matching


def ordered(runs: Sequence[FoundRun], key: str) -> list[FoundRun]:
    """By a setting or a result, numbers before text, descending if `key` begins with a minus; runs without it last."""
    name = key.removeprefix("-")
    check_key("sort", name, runs)
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


def _equal(value: Any, text: str) -> bool:
    try:
        return float(text) == value if is_number(value) else to_override_value(value) == text
    except ValueError:
        return False
