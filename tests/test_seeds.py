"""Which seeds are for what (docs/studies/README.md), figures of recipes, and the spread that a sweep prints."""

import csv
import re
from itertools import groupby
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import pytest
import yaml
from conftest import ROOT

from lm.cli.tables import over_seeds
from lm.config.identity import config_hash
from tests.helpers.runs import composed

CONFIGS = ROOT / "configs"
RULE = (ROOT / "docs/studies/README.md").read_text()
FIRST_OF = {
    purpose: int(first) for first, purpose in re.findall(r"^\| (\d+) (?:to|and) .*?\| (\w+)", RULE, re.MULTILINE)
}
with open(ROOT / "docs/studies/recipe_figures.csv", newline="") as file:
    GROUPS = {  # settings and the recipe that they meant -> the losses by seed, in the order of their measurement
        key: {int(row["seed"]): float(row["val_loss"]) for row in rows}
        for key, rows in groupby(csv.DictReader(file), lambda row: (row["settings"], row["recipe"]))
    }
TODAY = {settings: (recipe, losses) for (settings, recipe), losses in GROUPS.items()}  # the last of each settings
RECIPES = [settings for settings in TODAY if settings.startswith("experiment=")]


def mean(settings: str) -> str:
    return f"{fmean(TODAY[settings][1].values()):.3f}"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("ablation/*.yaml")), ids=lambda path: path.stem)
def test_an_included_ablation_uses_seeds_for_their_purpose(path: Path) -> None:
    assert list(FIRST_OF) == ["development", "conditions", "tuning", "figures"]
    assert list(FIRST_OF.values()) == sorted(FIRST_OF.values())
    ablation = yaml.safe_load(path.read_text())
    tuning = range(FIRST_OF["tuning"], FIRST_OF["figures"])
    offsets = (0, *ablation.get("seed_offsets", {}).values())
    assert {seed + offset for seed in ablation["seeds"] for offset in offsets} <= set(range(tuning.start))
    assert set(ablation.get("tune", {}).get("seeds", [tuning.start])) <= set(tuning)


@pytest.mark.parametrize("settings", RECIPES)
def test_the_figures_of_a_recipe_are_of_fresh_seeds_and_of_todays_settings(settings: str) -> None:
    seeds = [seed for (same, _), losses in GROUPS.items() if same == settings for seed in losses]
    assert len(seeds) == len(set(seeds))  # with each recipe that these settings have meant, other seeds
    assert min(seeds) >= FIRST_OF["figures"]
    assert len(TODAY[settings][1]) >= 7
    assert TODAY[settings][0] == config_hash(composed(*settings.split(), "seed=0"))[:8]


@pytest.mark.parametrize("settings", TODAY)
def test_the_page_states_mean_and_spread(settings: str) -> None:
    page = (ROOT / "docs/performance.md").read_text().replace("train.py ", "")
    losses = list(TODAY[settings][1].values())
    (row,) = re.findall(rf"^\| `?{re.escape(settings)}`? .*", page, re.MULTILINE)
    spread = stdev(losses)
    assert row.endswith(f"| {len(losses)} | {fmean(losses):.4f} | {spread:.4f} | {spread / sqrt(len(losses)):.4f} |")


def test_configs_and_readme_state_the_means() -> None:
    stated = {
        path.stem: re.findall(r"val_loss (\d\.\d+)", path.read_text()) for path in CONFIGS.glob("experiment/*.yaml")
    }
    expected: dict[str, list[str]] = {name: [] for name in stated}
    for settings in RECIPES:
        expected[settings.split()[0].partition("=")[2]].append(mean(settings))
    assert stated == expected
    figures = re.search(r"\((\d\.\d+)\s+and\s+(\d\.\d+) nats, means over", (ROOT / "README.md").read_text())
    assert figures
    shorter = next(settings for settings in RECIPES if "max_tokens" in settings)
    assert list(figures.groups()) == [mean(shorter), mean("nanoGPT")]


def test_a_sweep_over_seeds_ends_with_their_mean_and_spread() -> None:
    def of_seed(seed: int, loss: float) -> dict[str, float]:
        return {"seed": seed, "val_loss": loss}

    runs = [
        (head, of_seed(seed, seed + plus)) for head, plus in (("tied", 0.5), ("untied", 0.0)) for seed in (1, 2, 3, 6)
    ]
    head, *rows = over_seeds([*runs, ("once", of_seed(0, 1.0))])
    assert head == ("settings", "seeds", "mean val_loss", "sd", "standard error")
    assert rows == [("tied", "4", "3.5000", "2.1602", "1.0801"), ("untied", "4", "3.0000", "2.1602", "1.0801")]
    assert over_seeds([("tied", of_seed(0, 1.0)), ("untied", of_seed(0, 2.0)), ("tied", of_seed(0, 1.0))]) == []
