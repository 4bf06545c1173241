"""Published numbers: verdicts on the studies under docs/ follow from their rows, figures of recipes from new seeds."""

import csv
import json
import re
import shlex
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import ROOT
from hydra import initialize_config_dir
from scipy import stats

from lm.cli.compose import compose
from lm.cli.summaries import sweep
from lm.config import RunConfig
from lm.config.identity import config_hash, flat
from lm.lab.ablation.contrasts import Contrast, decimals
from lm.lab.ablation.record import EARLIER, read_record, write_record
from lm.lab.ablation.response_surface import combine_regrets
from lm.lab.ablation.results import read_results
from lm.lab.ablation.settings import METRICS, AblateConfig
from lm.lab.ablation.statistics import TuningVariance
from lm.lab.commands.question import compose_arms
from tests.helpers.runs import composed

CONFIGS, DOCS = ROOT / "configs", ROOT / "docs/studies"
STUDIES = sorted(str(path.parent.relative_to(DOCS)) for path in DOCS.rglob("ablation.json"))
EDGES = {  # arms whose loss still fell, by more than the margin per factor, at the last value that was tried
    "own_text": {"plain", "decay", "best", "ema", "documents", "untied"},
    "tying_broken": {"broken"},
}
TUNED = {"recipe", "tying_broken", "own_text"} | {  # with enough trials to know their noise
    f"tying/{name}"
    for name in ("main", "small", "longer_tuned", "adamw", "adamw_longer", "vocab_512", "vocab_8192", "shakespeare")
}


# --- studies


class Posterior:
    """The distribution of a true mean, given differences and the variance that tuning adds."""

    def __init__(self, values: list[float], tuning: TuningVariance | None) -> None:
        of_seeds, of_tuning = stats.sem(values) ** 2, tuning.variance if tuning else 0.0
        total = of_seeds + of_tuning
        self.df = total**2 / (of_seeds**2 / (len(values) - 1) + of_tuning**2 / (tuning.df if tuning else 1))
        self.t = stats.t(self.df, np.mean(values), total**0.5)

    def p_of_zero(self) -> float:
        return float(2 * min(self.t.cdf(0), self.t.sf(0)))

    def p_outside(self, margin: float) -> float:
        return float(max(self.t.cdf(-margin), self.t.sf(margin)))


def rejected(ps: dict[Any, float]) -> set[Any]:
    """By Holm's method."""
    keys = sorted(ps, key=ps.__getitem__)
    first_kept = next((i for i, key in enumerate(keys) if ps[key] * (len(ps) - i) > 0.05), len(keys))
    return {*keys[:first_kept]}


def pairs_of(table: pd.DataFrame, contrast: Contrast, metric: str) -> tuple[tuple[str, ...], list[float]]:
    """The runs that a contrast rests on, and its paired differences."""
    rows = table[table.budgets.str.contains(rf"\b{contrast.budget}\b")]
    pairs = rows[rows.arm == contrast.arm].merge(rows[rows.arm == contrast.baseline], on="seed")
    return tuple(sorted([*pairs.run_dir_x, *pairs.run_dir_y])), [*(pairs[f"{metric}_x"] - pairs[f"{metric}_y"])]


@pytest.mark.parametrize("name", STUDIES)
def test_what_is_said_of_a_study_follows_from_its_rows(name: str) -> None:
    results, table = read_results(DOCS / name), pd.read_csv(DOCS / name / "results.csv")
    record, table = results.record, table[(table.purpose == "reported") & (table.status == "done")]
    lower_is_better, margin = METRICS[record.metric][0], record.equivalence_margin
    for is_primary in (False, True):
        family, posteriors = [], {}
        for contrast in (contrast for contrast in results.contrasts if contrast.primary == is_primary):
            runs, values = pairs_of(table, contrast, record.metric)
            tuning = combine_regrets({contrast.arm: 1, contrast.baseline: -1}, results.regrets)
            assert contrast.differences == pytest.approx(values)
            assert (contrast.tuning_sd > 0) == (name in TUNED)
            if len(values) > 1:
                posteriors[runs] = Posterior(values, tuning)
                family.append((runs, contrast))
            else:
                assert contrast.verdict == "undecided"
        different = rejected({runs: posterior.p_of_zero() for runs, posterior in posteriors.items()})
        equivalent = rejected({runs: posterior.p_outside(margin) for runs, posterior in posteriors.items()})
        for runs, contrast in family:
            t, df = posteriors[runs].t, posteriors[runs].df
            numbers = (contrast.mean_difference, contrast.ci_low, contrast.ci_high, contrast.df)
            assert numbers == pytest.approx((t.mean(), *t.interval(0.95), df))
            direction = "better" if (t.mean() < 0) == lower_is_better else "worse"
            verdict = "equivalent" if runs in equivalent else direction if runs in different else "undecided"
            arms = {"better": {contrast.baseline}, "worse": {contrast.arm}}.get(verdict, {*contrast.ended})
            if arms & EDGES.get(name, set()):  # what may gain from more search is not beaten
                assert contrast.undecided_by == "edge"
                verdict = "undecided"
            assert contrast.verdict == verdict or contrast.diverged
            size = f"{abs(t.mean()):.{decimals(margin)}f}"
            for arm in (contrast.arm, contrast.baseline):  # by its name, or by the value that makes it
                value = "".join(record.arms[arm].overrides[-1:]).partition("=")[2]
                assert arm in contrast.sentence or (value and value in contrast.sentence)
            for words in (contrast.verdict, size, f"{contrast.n_seeds} seeds"):
                assert words in contrast.sentence


def test_records_that_are_read_and_written_stay_the_same_but_for_what_was_removed(tmp_path: Path) -> None:
    for name in STUDIES:
        record = read_record(DOCS / name)
        write_record(record, tmp_path)
        assert read_record(tmp_path) == record, name
        before, after = (json.loads((path / "ablation.json").read_text()) for path in (DOCS / name, tmp_path))
        changed = {"runs", "trials", "contrasts", "tune", "analyses", *(key.partition(".")[0] for key in EARLIER)}
        unchanged = before.keys() - changed
        assert {arm.pop("copied") for arm in after["arms"].values()} == {0.0}, "what a record had not"
        assert {key: after[key] for key in unchanged} == {key: before[key] for key in unchanged}, name
        assert after["pairs"] == before["contrasts"], name
        names = {run["run_dir"] for run in before["runs"]} | {run for t in before["trials"] for run in t["run_dirs"]}
        assert {run.run_dir for run in record.runs} == names, name


@pytest.mark.slow
def test_what_pairs_save_is_what_the_rows_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/statistics.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(code, names := dict[str, Any]())
    expected = [
        f"| {len(own)} | "
        + " | ".join(
            f"{own[key].median():.2f} ({own[key].min():.2f} to {own[key].max():.2f})"
            for key in ("correlation", "ratio")
        )
        + f" | {own.is_wider.sum()} |"
        for _, own in names["table"]
    ]
    rows = [line for line in page.splitlines() if re.match(r"\| (`recipe|`tying|tying)", line)]
    assert sorted(row[row.index("|", 1) :] for row in rows) == sorted(expected)


PAGE = "".join(
    (DOCS / page).read_text().replace("\\\n ", "") for page in ("tying/protocol.md", "../cs336.md", "own_text.md")
)
COMMANDS = {
    f"tying/{name}": f"ablation=tying_core {words}" for name, words in re.findall(r"^\| `(\w+)` \| `(.+?)`", PAGE, re.M)
}
COMMANDS |= {name: words for words, name in re.findall(r"^python scripts/ablate.py (.+?)  # (\S+)$", PAGE, re.M)}
# `recipe` was run from a copy of its text; the others have settings that are no more
APART = {"recipe", "tying_pilot", "tying_trials", "tying/time"}


IN_CI = ["cs336/parts", "own_text", "tying/main", "tying_untie_when"]  # of each file of configs/ablation/ one
OTHERS = sorted({*STUDIES} - APART - {*IN_CI})


@pytest.mark.slow
@pytest.mark.parametrize("name", [*IN_CI, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_the_command_that_the_page_gives_asks_for_the_runs_of_the_study(name: str) -> None:
    """Whatever the defaults have become since: otherwise the rows would not count and all would run again."""
    words = shlex.split(COMMANDS[name])
    of_ablation = [word for word in words if word.lstrip("+~").startswith("ablation")]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("ablate", [*of_ablation, "ablation.name=any"], AblateConfig)
        others = [word for word in words if word not in of_ablation]
        runs = compose_arms(config.ablation, others, lambda words: compose("train", words, RunConfig))
    record = read_record(DOCS / name)
    assert (runs.keys(), config.ablation.seeds) == (record.arms.keys(), record.seeds)
    for arm, run in runs.items():
        removed = {"trainer.profiler": None}
        settings = removed | flat(asdict(run) | {"logger": {}}) | record.arms[arm].matched
        different = {key for key, value in record.arms[arm].settings.items() if settings[key] != value}
        assert different <= {"threads", "trainer.enable_progress_bar", "data.cache_dir"}


# --- figures of recipes

RULE = re.findall(r"^\| (\d+) (?:to|and) .*?\| (\w+)", (DOCS / "README.md").read_text(), re.M)
FIRST_OF = {purpose: int(first) for first, purpose in RULE}
with open(DOCS / "recipe_figures.csv", newline="") as file:
    FIGURES = {  # settings and the recipe that they meant -> the losses by seed, in the order of their measurement
        key: {int(row["seed"]): float(row["val_loss"]) for row in rows}
        for key, rows in groupby(csv.DictReader(file), lambda row: (row["settings"], row["recipe"]))
    }
LATEST = {settings: (recipe, losses) for (settings, recipe), losses in FIGURES.items()}
RECIPES = [settings for settings in LATEST if settings.startswith("experiment=")]


def test_included_ablations_use_seeds_for_their_purpose() -> None:
    assert list(FIRST_OF) == ["development", "conditions", "tuning", "figures"]
    tuning = range(FIRST_OF["tuning"], FIRST_OF["figures"])
    for path in CONFIGS.glob("ablation/*.yaml"):
        ablation = yaml.safe_load(path.read_text())
        offsets = (0, *ablation.get("seed_offsets", {}).values())
        assert {seed + offset for seed in ablation["seeds"] for offset in offsets} <= {*range(tuning.start)}, path
        assert {*ablation.get("tune", {}).get("seeds", [tuning.start])} <= {*tuning}, path


@pytest.mark.parametrize("settings", RECIPES)
def test_the_figures_of_a_recipe_are_of_fresh_seeds_and_of_its_latest_settings(settings: str) -> None:
    seeds = [seed for (same, _), losses in FIGURES.items() if same == settings for seed in losses]
    assert len(seeds) == len({*seeds})  # with each recipe that these settings have meant, other seeds
    assert min(seeds) >= FIRST_OF["figures"]
    recipe, losses = LATEST[settings]
    assert len(losses) >= 7
    assert recipe == config_hash(composed(*settings.split(), "seed=0"))[:8]


def test_pages_and_configs_state_the_means_and_deviations() -> None:
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


def test_a_sweep_ends_with_a_column_for_what_was_swept_and_a_row_for_each_set_of_seeds() -> None:
    figures = {"val_bpb": 1.0, "val_top1": 0.5, "n_params": 1000, "seconds": 2.0}
    runs = [
        ([f"head={head}", f"seed={seed}", "threads=1"], figures | {"seed": seed, "val_loss": seed + plus})
        for head, plus in (("tied", 0.5), ("untied", 0.0))
        for seed in (1, 2, 3, 6)
    ]
    head, *rows = sweep([*runs, (["head=once", "seed=0", "threads=1"], figures | {"seed": 0, "val_loss": 1.0})])
    assert head[:5] == ("head", "seeds", "mean val_loss", "sd", "standard error")
    assert rows[0][:5] == ("tied", "4", "3.5000", "2.1602", "1.0801")
    assert [row[:3] for row in rows[1:]] == [("untied", "4", "3.0000"), ("once", "1", "1.0000")]
    assert rows[2][3:5] == ("", ""), "of one seed there is no spread"
    head, *rows = sweep([runs[0], runs[4], runs[0]])
    assert (head[:2], [row[:2] for row in rows]) == (("head", "val_loss"), [("tied", "1.5000"), ("untied", "1.0000")])


def test_the_readme_shows_a_figure_of_its_recipe() -> None:
    """Within twice the spread of seeds, and what bf16 instead of fp32 changes."""
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs/own-text.md").read_text()
    (recipe,) = re.findall(r"^reading my\.txt .*(experiment=\w+)", readme, re.M)
    ((bits, ngram),) = re.findall(r"^bits per byte +([\d.]+) \(n-gram ([\d.]+)\)", readme, re.M)
    ((mean_bits, baseline),) = re.findall(rf"^\| `train.py {recipe} .*?(\d\.\d+) \| (\d\.\d+) \| 7", page, re.M)
    ((_, losses),) = (LATEST[settings] for settings in RECIPES if settings.split()[0] == recipe and "FILE" in settings)
    spread = stdev(losses.values()) * float(mean_bits) / fmean(losses.values())  # in bits per byte
    assert float(bits) == pytest.approx(float(mean_bits), abs=2 * spread + 0.01)
    assert ngram == baseline
