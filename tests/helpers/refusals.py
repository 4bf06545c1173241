"""What a user gets wrong is refused in one line."""

from contextlib import contextmanager

import pytest

from lm.errors import UserError


@contextmanager
def refused(match):
    """The block is refused in one line that matches."""
    with pytest.raises(UserError, match=match) as caught:
        yield
    assert "\n" not in str(caught.value)
