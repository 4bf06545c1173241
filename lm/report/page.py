"""Markdown, and the page it becomes: one file that opens anywhere, without network or script."""

import html
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from lm.system.terminal import printable

CSS = Path(__file__).with_name("report.css")
HERE = "▶"  # a place in a block of code, where nothing can be bold; coloured in the page
LONG = 40  # characters of a table's cell that may be broken into lines
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
NUMBER = re.compile(r"-|[-+<]?\d[\d,.e+-]*(\s.{0,24})?")  # also with its unit or its interval


def tame(text: str) -> str:
    """Text without characters that would steer a terminal which shows the report: they become escapes."""
    return CONTROL.sub(lambda found: printable(found[0]), text)


def plain(text: str) -> str:
    """Text from outside as Markdown that shows it as it is, in a paragraph or in the cell of a table."""
    text = re.sub(r"([\\`*\[\]<>|&~!#$])", r"\\\1", tame(" ".join(text.split())))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)  # a_b needs none, and reads better without


def code(text: str) -> str:
    """Text in a line as code; in a table a | would end the cell if it had no backslash."""
    ticks, text = "`" * (longest_run(text) + 1), tame(" ".join(text.split())).replace("|", "\\|")
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def fence(text: str) -> str:
    """Text from outside as a block of code that it cannot leave."""
    ticks, text = "`" * max(3, longest_run(text) + 1), re.sub(r"\r\n?", "\n", text)
    return f"{ticks}\n{tame(text)}\n{ticks}"


def longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are Markdown. Columns of numbers are aligned to the right."""
    columns = list(zip(*rows, strict=True)) or [()] * len(head)
    rule = ["---:" if all(NUMBER.fullmatch(cell) for cell in column if cell) else "---" for column in columns]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


def page(title: str, markdown: str, pictures: Mapping[str, str]) -> str:
    """The report as HTML. Pictures stand in the page itself, under the addresses that the Markdown has for them."""
    renderer = MarkdownIt("commonmark", {"html": False}).enable("table")

    def image(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        name = Path(tokens[index].attrs["src"]).stem
        label = html.escape(tokens[index].content)
        return pictures[name].replace("<svg", f'<svg role="img" aria-label="{label}"', 1)

    def fence(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        text = html.escape(tokens[index].content.removesuffix("\n"))
        return f"<pre><code>{text.replace(HERE, f'<mark>{HERE}</mark>')}</code></pre>\n"

    def text(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        return html.escape(tokens[index].content, quote=False).replace("_", "_<wbr>")  # long names may be broken there

    renderer.add_render_rule("image", image)
    renderer.add_render_rule("text", text)
    renderer.add_render_rule("fence", fence)
    renderer.add_render_rule("table_open", lambda *_: '<div class="wide" tabindex="0"><table>\n')
    renderer.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = renderer.parse(markdown)
    for token, content in pairwise(tokens):
        if token.type == "heading_open":
            token.attrSet("id", slug(content.content))
        elif token.type == "td_open" and len(content.content) > LONG:
            token.attrSet("class", "prose")
    body = renderer.renderer.render(tokens, renderer.options, {})
    return SKELETON.format(title=html.escape(title), css=CSS.read_text(), body=body)


def slug(heading: str) -> str:
    """The name under which a heading can be linked to, here and on GitHub."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


SKELETON = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{css}</style>
</head>
<body>
<main>
{body}</main>
</body>
</html>
"""
