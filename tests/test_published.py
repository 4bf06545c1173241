"""Published numbers: sentences of tuned studies follow from their rows, figures of recipes are of fresh seeds."""

import re

import pandas as pd
import pytest
from scipy import stats

from lm.config import config_hash
from lm.lab.ablation.folder import read_record
from lm.lab.ablation.results import read_results
from lm.lab.results import contrasts
from scripts.pages.recipes import figures, texts
from tests.helpers import ROOT
from tests.helpers.refusals import refused
from tests.helpers.runs import composed

DOCS = ROOT / "docs/studies"
STUDIES = sorted(str(path.parent.relative_to(DOCS)) for path in DOCS.rglob("contrasts.csv"))


# --- studies


def test_all_studies_are_frozen():
    frame = contrasts(DOCS)
    published = pd.concat(pd.read_csv(DOCS / name / "contrasts.csv") for name in STUDIES)
    assert [*frame.sentence[frame.ablation.isin(STUDIES)]] == [*published.sentence]
    with refused("is a study that is frozen as published"):
        read_record(DOCS / STUDIES[0])


@pytest.mark.parametrize(("study", "text"), [("heads", ""), ("heads_30k", ", 30 kB"), ("heads_10k", ", 10 kB")])
def test_a_tuned_study_is_judged_anew_from_its_rows(study, text):
    """The page states the sentence that its rows give, and at each factor the difference from the tied head's score."""
    page = (DOCS / "heads.md").read_text()
    assert contrasts(DOCS / study)["sentence"].item() in " ".join(page.replace("**", "").split())
    rows = pd.read_csv(DOCS / study / "results.csv")
    scores = pd.Series(read_results(DOCS / study).scored["tied"].scores)
    for arm, own in rows[rows.purpose == "reported"].groupby("arm"):
        (line,) = re.findall(rf"^\| {arm}{text} \|.*", page, re.MULTILINE)
        shown = [float(cell) for cell in re.findall(r"[+-]?\d\.\d{3}", line)]
        differences = own.pivot(index="seed", columns="factor", values="val_loss").sub(scores, axis=0)
        halves = stats.t.ppf(0.975, len(scores) - 1) * differences.sem()
        assert shown == pytest.approx(
            [x for pair in zip(differences.mean(), halves, strict=True) for x in pair], abs=6e-4
        )


# --- figures of recipes

FIRST_SEED = 2000  # smaller ones have served to choose something: docs/studies/README.md

FIGURES = {  # settings and the recipe that they meant -> the losses by seed, in the order of their measurement
    (settings, recipe): {int(row["seed"]): float(row["val_loss"]) for row in rows}
    for settings, recipe, rows in figures()
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
    for path, text in texts().items():
        assert path.read_text() == text, "run: python -m scripts.pages.recipes"
