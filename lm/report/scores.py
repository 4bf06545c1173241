"""The figure of evaluate: calibration, and the loss by the frequency of the target."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib

from lm.report.plots import STYLE, legend, looks, panels
from lm.system.files import atomic_file


def plot_scores(scores: list[dict[str, Any]], path: Path) -> None:
    """Write both panels, with a line for each run and text, as the SVG or PNG that the name of the file says."""
    with matplotlib.rc_context(STYLE):
        figure, (above, below) = panels(2, 2.6, 0.4)
        above.plot([0, 1], [0, 1], color="#999999", linewidth=1)  # where confidence equals accuracy
        for score, look in zip(scores, looks([*map(str, range(len(scores)))]).values(), strict=True):
            style = asdict(look) | {"label": f"{Path(score['run']).name}, {Path(score['text']).name}"}
            bins, bands = score["calibration"], score["by_frequency"]
            above.plot([row["confidence"] for row in bins], [row["accuracy"] for row in bins], **style)
            below.plot([row["band"] for row in bands], [row["loss"] for row in bands], **style)
        above.set(title="Calibration", xlabel="probability of the most probable token", ylabel="accuracy")
        below.set(title="Loss by frequency", xlabel="frequency band (1: most frequent)", ylabel="nats per token")
        below.set_xticks(range(1, 6))
        legend(figure, above)
        undated: Any = {"Date": None} if path.suffix == ".svg" else None
        with atomic_file(path) as file:
            figure.savefig(file, format=path.suffix[1:], dpi=150, metadata=undated)
