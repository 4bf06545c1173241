"""The validation loss of several runs during training, in one picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lm.config import UserError
from lm.report.metrics import FILE, Points, after, points, read_lines
from lm.report.plots import NAME, legend, looks, panels, save, tokens_axis, window
from lm.runs.find import FoundRun, differing, without_parts_of_the_head
from lm.system.terminal import printable, to_override_value

MOST = 16  # curves that a legend can tell apart


def plot_runs(runs: Sequence[FoundRun], path: Path) -> str:
    """Write an .svg or .png file; returns what it shows. Raises UserError if no run has a curve."""
    curves = {run.name: curve_of(run) for run in runs}
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        raise UserError(f"plot={path}: none of these runs has a validation loss in its {FILE}")
    save(lambda: picture(curves, labels([run for run in runs if run.name in curves])), path)
    many = f"; more than {MOST} have no legend" * (len(curves) > MOST)
    return f"{path}: the validation loss of {len(curves)} of {len(runs)} runs{many}"


def curve_of(run: FoundRun) -> Points:
    return points(read_lines(run.path / FILE), "val/loss")


def labels(runs: Sequence[FoundRun]) -> dict[str, str]:
    """The settings that differ, where they tell the runs apart and fit into a legend; else the names."""
    keys = without_parts_of_the_head(differing(runs), runs)
    found = {
        run.name: " ".join(f"{key.rpartition('.')[2]}={to_override_value(run[key])}" for key in keys) for run in runs
    }
    found = {name: printable(said.replace("name=", "")) for name, said in found.items()}
    told = len({*found.values()}) == len(found) and max(map(len, found.values())) <= NAME
    return found if told else {name: printable(name) for name in found}


def picture(curves: dict[str, Points], names: dict[str, str]) -> Figure:
    style = looks(list(curves))
    figure, (axes,) = panels(1, 3.2, 0.2 * min(len(curves), MOST))
    for name, curve in curves.items():
        look, marker = style[name], "o" if len(curve) == 1 else None
        axes.plot(*zip(*curve.items(), strict=True), c=look.color, ls=look.linestyle, marker=marker, label=names[name])
    late = [value for one in curves.values() for value in after(one, 3)]
    every = [value for one in curves.values() for value in one.values()]
    axes.set(ylabel="validation loss, nats per token", ylim=window(late, every))
    tokens_axis(axes)
    if len(curves) <= MOST:
        legend(figure, axes)
    return figure
