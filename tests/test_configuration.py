"""The reference of all settings in docs/configuration.md is what the dataclasses say."""

import pytest

from lm.cli.main import COMMANDS
from tests.helpers.configuration import PAGE, page


def test_the_page_is_what_the_dataclasses_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)  # the default of data.cache_dir depends on it
    text = PAGE.read_text()
    assert text == page(), "run: python -m tests.helpers.configuration"
    assert [name for name in COMMANDS if f"\n## {name}\n" not in text] == []
    assert [line for line in text.splitlines() if line.endswith("|  |")] == []  # each setting says what it is
