"""Interactions of an ablation, as formulas: a comparison of two comparisons."""

import re
from collections.abc import Mapping

from lm.config.checks import BadInput, expect

NAME = r"[\w.-]{1,40}"  # of an arm, and of an ablation
NAMES = "a name of letters, digits, dots, - and _"
FORMULA = re.compile(rf"\(({NAME}) - ({NAME})\) - \(({NAME}) - ({NAME})\)")


def interaction(formula: str) -> tuple[tuple[str, str], dict[str, int]]:
    """Both differences of a formula, in words, and the weight that each arm has.

    >>> interaction("(a - b) - (c - b)")
    (('a - b', 'c - b'), {'a': 1, 'b': 0, 'c': -1})

    Raises ValueError for another form.
    """
    if not (found := FORMULA.fullmatch(formula)):
        raise ValueError(formula)
    a, b, c, d = found.groups()
    weights = dict.fromkeys((a, b, c, d), 0)
    for arm, weight in ((a, 1), (b, -1), (c, -1), (d, 1)):
        weights[arm] += weight
    return (f"{a} - {b}", f"{c} - {d}"), weights


def check_interactions(interactions: Mapping[str, str], contrasts: Mapping[str, str], key: str) -> None:
    """Raise BadInput if one is no difference of two of the comparisons, each an arm -> its baseline."""
    known = [f"{arm} - {other}" for arm, other in contrasts.items()]
    for name, formula in interactions.items():
        said = f"{key}.{name}={formula}"
        expect(bool(re.fullmatch(NAME, name)), said, NAMES)
        try:
            pair, _ = interaction(formula)
        except ValueError:
            raise BadInput(f"{said}: expected (arm - baseline) - (arm - baseline)") from None
        for one in pair:
            if one not in known:
                choice = f"choose two of {', '.join(known)}"
                raise BadInput(f"{said}: {one} is no comparison of this ablation; {choice}")
        expect(pair[0] != pair[1], said, "two different comparisons")
