"""How figures look, and how they become SVG. Without pyplot, which keeps global state and looks for a screen."""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from lm.system.terminal import printable

WIDTH = 4.8  # inches: on a telephone the letters are drawn at about their size
NAME = 24  # letters of an arm's name that fit
INK, SOFT, LINE, PAPER = "#1a1a1a", "#666666", "#e2e2e2", "#ffffff"
THEME = {INK: "currentColor", SOFT: "var(--soft)", LINE: "var(--line)", PAPER: "var(--paper)"}  # in a page
STYLE = Path(__file__).with_name("templates") / "figures.mplstyle"
# First the colours of Okabe and Ito (2008), which all kinds of colour vision tell apart, without their yellow, which is
# too pale for lines; more arms take further hues. The first arm is blue and the second orange in every figure.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", INK, "#8C510A", "#7B61FF")
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X"
Name = TypeVar("Name")


def as_svg(draw: Callable[..., Figure | None], *content: Any) -> str | None:
    """Return what a function draws of this content as an <svg> element, or None if it draws nothing.

    The element can stand in one page with others: it has no prolog, and its ids begin with the name of the function.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(fname=STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a reader of the page has the fonts of all scripts
        if (figure := draw(*content)) is None:
            return None
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{draw.__name__}-", text[text.index("<svg") :])


def inline(svg: str, label: str) -> Markup:
    """Return an <svg> element that takes the colours of its page, light or dark. `label` is read aloud.

    matplotlib escapes the text of a figure, so the element is safe as it is.
    """
    themed = re.sub("|".join(THEME), lambda colour: THEME[colour[0]], svg)
    return Markup(themed.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1))


@dataclass(slots=True, frozen=True)
class LineStyle:
    """Colour, dashes and marker of an arm: each alone tells it from its neighbours."""

    color: str
    linestyle: str
    marker: str


def line_styles(names: Sequence[Name]) -> dict[Name, LineStyle]:
    """Return a style for each name, the same in all figures. A colour that comes again has other dashes.

    >>> first, *others, last = line_styles(range(11)).values()
    >>> first.color == last.color, first.linestyle == last.linestyle, first.marker == last.marker
    (True, False, False)
    """
    n = len(COLOURS)
    return {
        name: LineStyle(COLOURS[i % n], DASHES[(i + i // n) % len(DASHES)], MARKERS[(i + i // n) % len(MARKERS)])
        for i, name in enumerate(names)
    }


def panels(rows: int, height: float, extra: float = 0.0, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return axes below each other, each so many inches high, with room for a legend above them."""
    figure = Figure(figsize=(WIDTH, rows * height + extra))
    return figure, list(figure.subplots(rows, squeeze=False, **options)[:, 0])


def legend(figure: Figure, axes: Axes) -> None:
    """Draw the legend above the panels, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    widest = 0.082 * max(map(len, labels), default=0) + 0.6  # inches, with the sample of a line
    figure.legend(handles, map(shorten, labels), loc="outside upper left", ncols=max(1, int(WIDTH / widest)))


def tokens_axis(axes: Axes) -> None:
    """Label the axis of training tokens, as 200k and 1.5M."""
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(xlabel="training tokens")


def log_axis(axis: Axis) -> None:
    """Give a logarithmic axis plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def shorten(name: str, length: int = NAME) -> str:
    """Return a name that may come from outside, as the text of a figure.

    >>> shorten("a_name_too_long_for_its_place", 12)
    'a_name…place'
    """
    name = printable(name)
    return name if len(name) <= length else f"{name[: length // 2]}…{name[len(name) - length + length // 2 + 1 :]}"


def axis_limits(
    core: Iterable[float], others: Iterable[float] = (), least: float = 0.0, reach: float = 2.0
) -> tuple[float, float]:
    """Return the range of an axis: all of `core`, and of `others` what lies near, so no arm far off crushes the rest.

    Near is `reach` times the range of `core`, which counts as at least `least`.

    >>> axis_limits([0.0, 1.0], [1.5, 40.0])
    (-0.09, 1.59)
    """
    others = list(others)
    values = list(core) or others or [0.0]
    low, high = min(values), max(values)
    near = reach * max(high - low, least) or abs(high) or 1.0
    values += [value for value in others if low - near <= value <= high + near]
    margin = 0.06 * max(max(values) - min(values), least) or 0.06 * near
    return float(f"{min(values) - margin:.12g}"), float(f"{max(values) + margin:.12g}")
