"""The figure of evaluate: calibration, and the loss by the frequency of the target."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lm.report.figures import SOFT, legend, line_styles, panels, save


def plot_scores(scores: list[dict[str, Any]], path: Path) -> None:
    """Write both panels, with a line for each run and text, as the SVG or PNG that the name of the file says."""
    save(lambda: _draw(scores), path)


def _draw(scores: list[dict[str, Any]]) -> Figure:
    figure, (above, below) = panels(2, 2.6, 0.4)
    above.plot([0, 1], [0, 1], color=SOFT, linewidth=1)  # where confidence equals accuracy
    for score, name, style in zip(scores, _names(scores), line_styles(range(len(scores))).values(), strict=True):
        options = asdict(style) | {"label": name}
        bins, bands = score["calibration"], score["by_frequency"]
        above.plot([row["confidence"] for row in bins], [row["accuracy"] for row in bins], **options)
        below.plot([row["band"] for row in bands], [row["loss"] for row in bands], **options)
    above.set(title="Calibration", xlabel="probability of the most probable token", ylabel="accuracy")
    below.set(title="Loss by frequency", xlabel="frequency band (1: most frequent)", ylabel="nats per token")
    below.set_xticks(range(1, 6))
    legend(figure, above)
    return figure


def _names(scores: list[dict[str, Any]]) -> list[str]:
    """Run and text of each, without the one that all share: a legend has little room."""
    runs, texts = ([Path(score[key]).name for score in scores] for key in ("run", "text"))
    if len({*texts}) == 1:
        return runs
    return texts if len({*runs}) == 1 else [f"{run}, {text}" for run, text in zip(runs, texts, strict=True)]
