"""Cases of a test, of which the fast tests take a few."""

import pytest


def some(cases, every):
    """Cases of a test: one of `every` in the fast tests, the others nightly. A tuple is several arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.nightly] * (i % every > 0))
        for i, case in enumerate(cases)
    ]
