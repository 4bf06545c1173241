"""Templates as pages: one environment for all reports, with autoescape, and the filters that they share.

A template whose name ends in .html.j2 escapes all that it is given but figures. Markdown templates name their filter:
`md` for text, an indented block for code. Control characters become escapes in both.
"""

import functools
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lm.system.terminal import printable

LAB = Path(__file__).parents[1]
NBSP = "\N{NO-BREAK SPACE}"
NO_VALUE = "-"
LONG = 12  # number of digits that nobody reads any more


def render(template: str, **context: Any) -> str:
    """Return the text of a template of the lab. What cannot be written as UTF-8 becomes a question mark."""
    return _environment().get_template(template).render(**context).encode(errors="replace").decode()


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader([LAB / folder for folder in ("report/templates", "look/page", "formats/templates")]),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = (nbsp, signed, fixed, grouped, p_value, md)
    environment.filters |= {function.__name__: function for function in filters} | {"python": repr}
    environment.tests["missing"] = lambda value: value is None or value != value
    return environment


def _visible(value: Any) -> Any:
    """Return text with control characters as escapes. Spaces that do not break stay."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return NBSP.join(map(printable, value.split(NBSP)))


def nbsp(text: str) -> str:
    """Return prose in which no line ends between a number and its %."""
    return text.replace(" %", f"{NBSP}%")


def grouped(value: float | None) -> str:
    """
    >>> grouped(1234567)
    '1,234,567'
    """
    return NO_VALUE if value is None or value != value else f"{value:,.0f}"


def p_value(p: float | None) -> str:
    return NO_VALUE if p is None or p != p else "<0.001" if p < 0.001 else f"{p:.3f}"


def signed(value: float | None, digits: int) -> str:
    """Return a difference with its sign and so many decimals.

    >>> signed(0.01234, 3), signed(-0.0001, 3), signed(None, 3), signed(1e-20, 22)
    ('+0.012', '+0.000', '-', '+1e-20')
    """
    return fixed(value, digits, "+z")


def fixed(value: float | None, digits: int, sign: str = "") -> str:
    """Return a number with so many decimals, or with an exponent if the decimals are many or the number is long."""
    if value is None or value != value:  # pandas has NaN for a missing value
        return NO_VALUE
    return format(value, f"{sign}.{digits}f" if digits < LONG and abs(value) < 10**LONG else f"{sign}.4g")


def md(text: Any) -> str:
    """Return text from outside as Markdown that shows the text as it is, in a paragraph or in the cell of a table.

    >>> md("a_b <c>")
    'a_b \\\\<c\\\\>'
    """
    text = re.sub(r"([\\`*\[\]<>|&~!#$])", r"\\\1", " ".join(str(text).split()))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)  # a_b needs none, and reads better without
