"""The curves of runs: read from their metrics.csv, and in one picture."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from lm.errors import UserError
from lm.lab.ablation.folder import finite
from lm.lab.report.figures import NAME, STYLE, axis_limits, legend, line_styles, panels, tokens_axis
from lm.lab.runs.find import FoundRun, differing, without_parts_of_the_head
from lm.system.terminal import printable, to_override_value
from lm.training.run_directory import METRICS, read_rows

MAX_LABELS = 16  # curves that a legend can tell apart


def read_curves(run_dir: Path) -> pd.DataFrame:
    """Return the columns of metrics.csv, indexed by training tokens. What is no finite number is missing."""
    frame = finite(pd.DataFrame(read_rows(run_dir / METRICS)))
    return frame.dropna(subset="tokens").set_index("tokens") if "tokens" in frame else frame


def curve(frame: pd.DataFrame, column: str) -> pd.Series:
    """Return the values of a column that there are."""
    return frame[column].dropna() if column in frame else pd.Series(dtype=float)


def tail(curve: pd.Series, part: int) -> list[float]:
    """Return the values after the first 1/part of a curve, because the first values are often far off."""
    return [*curve[part * curve.index >= curve.index.max()]] if len(curve) else []


def plot_runs(runs: Sequence[FoundRun], path: Path, title: str) -> str:
    """Write an .svg or .png file, and return what it shows. `title` stands in the metadata of the file.

    Raises UserError if no run has a curve.
    """
    curves = {run.name: curve(read_curves(run.path), "val/loss") for run in runs}
    shown = [run for run in runs if len(curves[run.name])]
    if not shown:
        raise UserError(f"plot={path}: none of these runs has a validation loss in its {METRICS}")
    with matplotlib.rc_context(fname=STYLE):
        undated = {"Date": None} if path.suffix == ".svg" else {}  # the same runs give the same file
        _picture(curves, shown).savefig(path, dpi=200, metadata={"Title": title} | undated)
    many = f"; more than {MAX_LABELS} have no legend" * (len(shown) > MAX_LABELS)
    return f"{path}: the validation loss of {len(shown)} of {len(runs)} runs{many}"


def _picture(curves: dict[str, pd.Series], runs: Sequence[FoundRun]) -> Figure:
    figure, (axes,) = panels(1, 3.2, 0.2 * min(len(runs), MAX_LABELS))
    labels, styles = _labels(runs), line_styles([run.name for run in runs])
    for run in runs:
        values, style = curves[run.name], styles[run.name]
        marker = "o" if len(values) == 1 else None
        axes.plot(values.index, values, color=style.color, ls=style.linestyle, marker=marker, label=labels[run.name])
    late = [value for run in runs for value in tail(curves[run.name], 3)]
    axes.set(ylabel="validation loss, nats per token", xlim=(0, None))
    axes.set_ylim(axis_limits(late, [value for run in runs for value in curves[run.name]]))
    tokens_axis(axes)
    if len(runs) <= MAX_LABELS:
        legend(figure, axes)
    return figure


def _labels(runs: Sequence[FoundRun]) -> dict[str, str]:
    """Return the settings that differ, if they tell the runs apart and fit into a legend, else the names."""
    keys = without_parts_of_the_head(differing(runs), runs)
    labels = {}
    for run in runs:
        words = " ".join(f"{key.rpartition('.')[2]}={to_override_value(run[key])}" for key in keys)
        labels[run.name] = printable(words.replace("name=", ""))
    distinct = len({*labels.values()}) == len(labels) and max(map(len, labels.values())) <= NAME
    return labels if distinct else {name: printable(name) for name in labels}
