"""Published numbers: contrasts of the studies under docs/ follow from their rows, figures of recipes from new seeds."""

import csv
import json
import re
from functools import cache
from itertools import groupby
from statistics import fmean, stdev

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from scipy import stats

from lm.cli.arguments import CONFIGS
from lm.config import config_hash
from lm.errors import UserError
from lm.lab.ablation.folder import read_record
from lm.lab.ablation.question import METRICS
from lm.lab.results import contrasts
from tests.helpers.runs import composed

DOCS = ROOT / "docs/studies"
STUDIES = sorted(str(path.parent.relative_to(DOCS)) for path in DOCS.rglob("contrasts.csv"))


# --- studies


@cache
def published(name):
    """The rows of contrasts.csv."""
    with open(DOCS / name / "contrasts.csv", newline="") as file:
        return [*csv.DictReader(file)]


@cache
def results(name):
    return pd.read_csv(DOCS / name / "results.csv")


def reported(name):
    """The rows of results.csv that verdicts rest on."""
    return results(name)[results(name).purpose == "reported"]


UNTUNED = [  # with one budget
    name
    for name in STUDIES
    if len({row["budget"] for row in published(name)}) == 1 and "trial" not in {*results(name).purpose}
]


def rejected(ps):
    """By Holm's method."""
    keys = sorted(ps, key=ps.__getitem__)
    first_kept = next((i for i, key in enumerate(keys) if ps[key] * (len(ps) - i) > 0.05), len(keys))
    return {*keys[:first_kept]}


def differences(table, row):
    """The paired differences that a contrast rests on."""
    done = table[table.budgets.str.contains(rf"\b{row['budget']}\b") & (table.status == "done")]
    pairs = done[done.arm == row["arm"]].merge(done[done.arm == row["baseline"]], on="seed")
    return [*(pairs[f"{row['metric']}_x"] - pairs[f"{row['metric']}_y"])]


def test_all_studies_are_frozen():
    frame = contrasts(DOCS)
    frame = frame[frame["ablation"].isin(STUDIES)]
    rows = [row for name in STUDIES for row in published(name)]
    assert [*frame.sentence] == [row["sentence"] for row in rows]
    with pytest.raises(UserError, match="is a study that is frozen as published"):
        read_record(DOCS / STUDIES[0])


@pytest.mark.parametrize("name", UNTUNED)
def test_an_untuned_study_is_judged_by_scipy_and_holms_method_as_it_was_published(name):
    """And so by the program: tests/test_rows.py."""
    rows, table = published(name), reported(name)
    margin, lower_is_better = float(rows[0]["equivalence_margin"] or 0.0), METRICS[rows[0]["metric"]].sign > 0
    for is_primary in ("false", "true"):
        values = {i: differences(table, row) for i, row in enumerate(rows) if row["primary"] == is_primary}
        ts = {i: stats.t(len(own) - 1, np.mean(own), stats.sem(own)) for i, own in values.items() if len(own) > 1}
        ps = {i: 2 * min(t.cdf(0), t.sf(0)) for i, t in ts.items()}
        different = rejected(ps)
        equivalent = rejected({i: max(t.cdf(-margin), t.sf(margin)) for i, t in ts.items()})
        for i, t in ts.items():
            assert json.loads(rows[i]["differences"]) == pytest.approx(values[i])
            numbers = [float(rows[i][key]) for key in ("mean_difference", "ci_low", "ci_high", "p")]
            assert numbers == pytest.approx([t.mean(), *t.interval(0.95), ps[i]])
            direction = "better" if (t.mean() < 0) == lower_is_better else "worse"
            verdict = "equivalent" if i in equivalent else direction if i in different else "undecided"
            assert rows[i]["verdict"] == verdict or json.loads(rows[i]["diverged"])


@pytest.mark.parametrize(("study", "text"), [("heads", ""), ("heads_30k", ", 30 kB")])
def test_a_tuned_study_is_judged_anew_from_its_rows(study, text):
    """The page states the sentence that its rows give, and the mean loss at each factor."""
    page = (DOCS / "heads.md").read_text()
    assert contrasts(DOCS / study)["sentence"].item() in " ".join(page.replace("**", "").split())
    for arm, own in reported(study).groupby("arm"):
        (line,) = re.findall(rf"^\| {arm}{text} \|.*", page, re.MULTILINE)
        shown = [float(cell) for cell in re.findall(r"\d\.\d{3}", line)]
        assert shown == own.groupby("factor")["val_loss"].mean().round(3).tolist()


# --- figures of recipes

FIRST_SEED = 2000  # smaller ones have served to choose something: docs/studies/README.md

with open(DOCS / "recipe_figures.csv", newline="") as file:
    FIGURES = {  # settings and the recipe that they meant -> the losses by seed, in the order of their measurement
        key: {int(row["seed"]): float(row["val_loss"]) for row in rows}
        for key, rows in groupby(csv.DictReader(file), lambda row: (row["settings"], row["recipe"]))
    }
LATEST = {settings: (recipe, losses) for (settings, recipe), losses in FIGURES.items()}
RECIPES = [settings for settings in LATEST if settings.startswith("experiment=")]


@pytest.mark.parametrize("settings", RECIPES)
def test_the_figures_of_a_recipe_are_of_fresh_seeds_and_of_its_latest_settings(settings):
    seeds = [seed for (same, _), losses in FIGURES.items() if same == settings for seed in losses]
    assert len(seeds) == len({*seeds})  # with each recipe that these settings have meant, other seeds
    assert min(seeds) >= FIRST_SEED
    recipe, losses = LATEST[settings]
    assert len(losses) >= 7
    assert recipe == config_hash(composed(*settings.split(), "seed=0"))[:8]


def test_pages_and_configs_state_the_means_and_deviations():
    page = "".join((ROOT / "docs" / name).read_text() for name in ("performance.md", "own-text.md"))
    page = page.replace("train.py ", "")
    means = {settings: fmean(losses.values()) for settings, (_, losses) in LATEST.items()}
    for settings, (_, losses) in LATEST.items():
        (row,) = re.findall(rf"^\| `?{re.escape(settings)}`? .*", page, re.M)
        sd, n = stdev(losses.values()), len(losses)
        assert row.endswith(f"| {n} | {means[settings]:.4f} | {sd:.4f} | {sd / n**0.5:.4f} |")
    for path in CONFIGS.glob("experiment/*.yaml"):
        own = [settings for settings in RECIPES if settings.split()[0] == f"experiment={path.stem}"]
        assert re.findall(r"val_loss (\d\.\d+)", path.read_text()) == [f"{means[settings]:.3f}" for settings in own]


def test_the_readme_shows_a_figure_of_its_recipe():
    """Within twice the spread of seeds, and what bf16 instead of fp32 changes."""
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs/own-text.md").read_text()
    (recipe,) = re.findall(r"^my\.txt has .*(experiment=\w+)", readme, re.M)
    ((bits, ngram),) = re.findall(r"^bits per byte +([\d.]+) \(n-gram ([\d.]+)\)", readme, re.M)
    ((mean_bits, baseline),) = re.findall(rf"^\| `train.py {recipe} .*?(\d\.\d+) \| (\d\.\d+) \| 7", page, re.M)
    ((_, losses),) = (LATEST[settings] for settings in RECIPES if settings.split()[0] == recipe and "FILE" in settings)
    spread = stdev(losses.values()) * float(mean_bits) / fmean(losses.values())  # in bits per byte
    assert float(bits) == pytest.approx(float(mean_bits), abs=2 * spread + 0.01)
    assert ngram == baseline
