"""Draw tying.svg, which shows what a tied and an untied model share: python docs/figures/draw.py"""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).parent
TIED, UNTIED, GREY = "#0072B2", "#D55E00", "#555555"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "lm", "font.family": "sans-serif", "font.size": 10}


def box(axes: Axes, y: float, text: str, colour: str, x: float = 0.5, width: float = 0.5) -> None:
    axes.add_patch(FancyBboxPatch((x - width / 2, y), width, 0.1, "round,pad=0.01", fc="white", ec=colour, lw=1.6))
    axes.text(x, y + 0.05, text, ha="center", va="center", color=colour)


Point = tuple[float, float]


def arrow(axes: Axes, start: Point, end: Point, colour: str = GREY, bend: float = 0) -> None:
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=colour, lw=1.4, connectionstyle=style)
    )


def tying() -> Figure:
    figure = Figure(figsize=(6.6, 3.3), layout="constrained")
    for axes, head in zip(figure.subplots(1, 2), ("tied", "untied"), strict=True):
        axes.set(xlim=(0, 1), ylim=(-0.02, 1.0), xticks=[], yticks=[])
        axes.axis("off")
        axes.set_title({"tied": "head=tied", "untied": "head=untied"}[head], family="monospace", fontsize=11)
        axes.text(0.5, 0.01, "token ids (B, T)", ha="center", va="center", color=GREY)
        box(axes, 0.15, "embedding matrix E (V, D)", TIED, width=0.62)
        box(axes, 0.4, "transformer blocks", GREY, width=0.62)
        logits = {"tied": "LM head: x Eᵀ", "untied": "LM head: x Wᵀ, W (V, D)"}[head]
        box(axes, 0.65, logits, TIED if head == "tied" else UNTIED, width=0.62)
        axes.text(0.5, 0.92, "raw logits (B, T, V)", ha="center", va="center", color=GREY)
        for low, high in ((0.04, 0.14), (0.27, 0.39), (0.52, 0.64), (0.77, 0.88)):
            arrow(axes, (0.5, low), (0.5, high))
        if head == "tied":
            arrow(axes, (0.83, 0.2), (0.83, 0.7), TIED, bend=0.45)
            axes.text(0.985, 0.45, "same matrix", rotation=90, ha="center", va="center", color=TIED, fontsize=9)
    return figure


if __name__ == "__main__":
    with matplotlib.rc_context(STYLE):
        path = HERE / "tying.svg"
        tying().savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
        path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
