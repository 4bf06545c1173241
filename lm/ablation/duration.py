"""Lengths of time in words."""


def spell(seconds: float) -> str:
    """A length of time as a person would say it.

    >>> spell(40), spell(400), spell(40000)
    ('40 s', '7 min', '11.1 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
