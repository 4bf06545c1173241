"""docs/glossary.md: in alphabetical order, each word once."""

import re

from conftest import ROOT


def test_the_words_are_in_order() -> None:
    words = re.findall(r"^- \*\*(.*?)\*\*: ", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert words == sorted({*words}, key=str.casefold)
    assert len(words) > 40
