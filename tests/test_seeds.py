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
from hydra import initialize_config_dir

from lm.cli.compose import compose
from lm.cli.mistakes import CONFIGS
from lm.cli.tables import over_seeds
from lm.config import RunConfig
from lm.config.identity import config_hash

RULE = (ROOT / "docs/studies/README.md").read_text()
FIRST_OF = {
    purpose: int(first) for first, purpose in re.findall(r"^\| (\d+) (?:to|and) .*?\| (\w+)", RULE, re.MULTILINE)
}
PAGE = (ROOT / "docs/performance.md").read_text()
with open(ROOT / "docs/studies/recipe_figures.csv", newline="") as file:
    ROWS = list(csv.DictReader(file))
GROUPS = {  # settings and the recipe that they meant -> the losses by seed, in the order of their measurement
    key: {int(row["seed"]): float(row["val_loss"]) for row in rows}
    for key, rows in groupby(ROWS, lambda row: (row["settings"], row["recipe"]))
}
TODAY = {settings: (recipe, losses) for (settings, recipe), losses in GROUPS.items()}  # the last of each settings
OURS = [settings for settings in TODAY if settings.startswith("experiment=")]
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


def test_every_experiment_that_states_a_loss_has_figures() -> None:
    stating = {path.stem for path in CONFIGS.glob("experiment/*.yaml") if "val_loss" in path.read_text()}
    assert stating == {settings.split()[0].partition("=")[2] for settings in OURS}


@pytest.mark.parametrize("settings", OURS)
def test_the_figures_of_a_recipe_are_of_fresh_seeds(settings: str) -> None:
    seen = [seed for (same, _), losses in GROUPS.items() if same == settings for seed in losses]
    assert len(seen) == len(set(seen))  # with each recipe that these settings have meant, other seeds
    assert min(seen) >= FIRST_OF["figures"]
    assert len(TODAY[settings][1]) >= 7


@pytest.mark.parametrize("settings", OURS)
def test_the_figures_are_those_of_todays_recipe(settings: str) -> None:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        run = compose("train", [*settings.split(), "seed=0"], RunConfig)
    assert TODAY[settings][0] == config_hash(run)[:8]


@pytest.mark.parametrize("settings", TODAY)
def test_the_page_states_mean_and_spread(settings: str) -> None:
    losses = list(TODAY[settings][1].values())
    (row,) = re.findall(rf"^\| `?{re.escape(settings)}`? .*", PAGE.replace("train.py ", ""), re.MULTILINE)
    spread = stdev(losses)
    figures = f"| {len(losses)} | {fmean(losses):.4f} | {spread:.4f} | {spread / sqrt(len(losses)):.4f} |"
    assert row.endswith(figures)


def mean(settings: str) -> str:
    return f"{fmean(TODAY[settings][1].values()):.3f}"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("experiment/*.yaml")), ids=lambda path: path.stem)
def test_a_config_states_the_mean(path: Path) -> None:
    figures = [mean(settings) for settings in OURS if settings.split()[0] == f"experiment={path.stem}"]
    assert re.findall(r"val_loss (\d\.\d+)", path.read_text()) == figures


def test_the_readme_states_both_means() -> None:
    stated = re.search(r"\((\d\.\d+)\s+and\s+(\d\.\d+) nats, means over", (ROOT / "README.md").read_text())
    assert stated
    assert list(stated.groups()) == [mean(next(one for one in OURS if "max_tokens" in one)), mean("nanoGPT")]


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
