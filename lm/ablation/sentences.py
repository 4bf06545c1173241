"""The answer in sentences, as the page, the terminal and `lm.compare` have it: verdict, meaning, costs."""

import math
import re
from typing import Any

import pandas as pd

from lm.ablation import views
from lm.ablation.record import AblationRecord, ArmRecord
from lm.ablation.results import Results
from lm.config.ablation import METRICS
from lm.config.identity import REPLACED, key_of


def sentences(results: Results) -> list[str]:
    """A sentence for each comparison that was asked for: its verdict, with perplexity, parameters and FLOPs.

    Arms that are values of one setting are called by these values.
    """
    return [_sentence(row, results.record) for row in views.asked(results).itertuples()]


def _sentence(row: Any, record: AblationRecord) -> str:
    text = str(row.statement)
    if row.family == "interaction":
        return text
    arm, baseline = record.arms[row.arm], record.arms[row.baseline]
    if pair := _values(arm, baseline):
        names = rf"\b{re.escape(row.arm)}( is \w+ than | and | compared with ){re.escape(row.baseline)}\b"
        between = {" compared with ": " against "}
        text = re.sub(names, lambda match: pair[0] + between.get(match[1], match[1]) + pair[1], text, count=1)
    if row.metric == "val_loss" and pd.notna(row.mean_difference):
        share = f"{100 * abs(math.expm1(row.mean_difference)):.1f} % {'lower' if row.mean_difference < 0 else 'higher'}"
        number = rf"([-+][\d.]+ {METRICS[row.metric][1]})(?: \((.*?)\))?"  # and its interval, if it has one
        text = re.sub(number, lambda match: f"{share} perplexity ({', '.join(filter(None, match.groups()))})", text)
    if arm.n_params:  # of rows of other programs nothing is known
        text = re.sub(r"(; [\d.]+ is detectable.*|\.$)", rf"; {_costs(arm, baseline)}\1", text, count=1)
    return text


def _values(arm: ArmRecord, baseline: ArmRecord) -> tuple[str, str] | None:
    """The value of the setting in which two arms differ, with its name, and that of the baseline; None if it is more.

    What a recipe has added to either belongs to the choice of its group.
    """
    if not (arm.overrides and baseline.overrides):
        return None
    (*added, own), (*others, other) = arm.overrides, baseline.overrides
    key, groups = key_of(own), REPLACED.get(key_of(own), ())
    is_alone = all(key_of(word).partition(".")[0] in groups for word in {*added} ^ {*others})
    if key_of(other) != key or own == other or not is_alone:
        return None
    return f"{key.rpartition('.')[2]}={own.partition('=')[2]}", other.partition("=")[2]


def _costs(arm: ArmRecord, baseline: ArmRecord) -> str:
    """The parameters and FLOPs of an arm beside those of its baseline."""
    parts = []
    for noun, own, other in (
        ("parameters", arm.n_params, baseline.n_params),
        ("FLOPs per token", arm.flops_per_token, baseline.flops_per_token),
    ):
        change = 100 * (own / other - 1)
        parts.append(
            f"same {noun}" if own == other else f"{abs(change):.2g} % {'more' if change > 0 else 'fewer'} {noun}"
        )
    return ", ".join(parts)
