"""Which seeds are for what (docs/studies/README.md, Seeds), and the spread over seeds that a sweep prints."""

import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from lm.cli.errors import CONFIGS
from lm.cli.summary import over_seeds

RULE = (ROOT / "docs/studies/README.md").read_text()
FIRST_OF = {
    purpose: int(first) for first, purpose in re.findall(r"^\| (\d+) (?:to|and) .*?\| (\w+)", RULE, re.MULTILINE)
}
ABLATIONS = sorted(CONFIGS.glob("ablation/*.yaml"))


def test_the_rule_is_complete() -> None:
    assert list(FIRST_OF) == ["development", "conditions", "tuning", "figures"]
    assert list(FIRST_OF.values()) == sorted(FIRST_OF.values())


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_an_included_ablation_uses_seeds_for_their_purpose(path: Path) -> None:
    ablation = yaml.safe_load(path.read_text())
    tuning = range(FIRST_OF["tuning"], FIRST_OF["figures"])
    offsets = (0, *ablation.get("seed_offsets", {}).values())
    assert {seed + offset for seed in ablation["seeds"] for offset in offsets} <= set(range(tuning.start))
    assert set(ablation.get("tune", {}).get("seeds", [tuning.start])) <= set(tuning)


def result(seed: int, loss: float) -> dict[str, float]:
    return {"seed": seed, "val_loss": loss}


def test_a_sweep_over_seeds_ends_with_their_mean_and_spread() -> None:
    runs = [
        (head, result(seed, seed + plus)) for head, plus in (("tied", 0.5), ("untied", 0.0)) for seed in (1, 2, 3, 6)
    ]
    head, *rows = over_seeds([*runs, ("once", result(0, 1.0))])
    assert head == ("settings", "seeds", "mean val_loss", "sd", "standard error")
    assert rows == [("tied", "4", "3.5000", "2.1602", "1.0801"), ("untied", "4", "3.0000", "2.1602", "1.0801")]


def test_no_spread_without_two_seeds() -> None:
    assert over_seeds([("tied", result(0, 1.0)), ("untied", result(0, 2.0)), ("tied", result(0, 1.0))]) == []
