"""The table at the end of a sweep: the mean result of the seeds of each combination of settings."""

from typing import Any

import pandas as pd

from lm.cli.arguments import key_of, unquoted
from lm.errors import without_secrets

FIGURES = ("seed", "val_loss", "val_bpb", "n_params", "seconds")  # results of a run in the table of a sweep


def sweep_table(finished: list[tuple[list[str], dict[str, Any]]]) -> list[tuple[str, ...]]:
    """Return a table of a sweep: a column for each setting that was swept, a row for all seeds of the same settings."""
    typed = [{key_of(word): unquoted(word.partition("=")[2]) for word in overrides} for overrides, _ in finished]
    keys = dict.fromkeys(key for settings in typed for key in settings if key not in ("seed", "run_dir"))
    swept = [key for key in keys if len({settings.get(key) for settings in typed}) > 1]
    values = [tuple(without_secrets(settings.get(key, "")) for key in swept) for settings in typed]
    runs = pd.DataFrame([{key: result[key] for key in FIGURES} for _, result in finished])
    groups = runs.assign(values=values).drop_duplicates(["values", "seed"]).groupby("values", sort=False)
    columns = ("seeds", "mean val_loss", "sd", "standard error", "mean val_bpb", "parameters", "seconds")
    rows: list[tuple[str, ...]] = [(*swept, *columns)]
    for group, seeds in groups:
        loss, mean = seeds["val_loss"], seeds[[*FIGURES]].mean()
        scores = (mean["val_loss"], loss.std(), loss.sem(), mean["val_bpb"])
        cells = ["" if pd.isna(score) else f"{score:.4f}" for score in scores]
        rows.append((*group, str(len(seeds)), *cells, f"{mean['n_params']:,.0f}", f"{mean['seconds']:.0f}"))
    return rows
