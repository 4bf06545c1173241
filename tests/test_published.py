"""The studies under docs/: what the program says of their rows is what scipy says of them."""

import csv
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import some
from hydra import initialize_config_dir
from scipy import stats

import lm
from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.sentence import decimals
from lm.ablation.judge.study import read_study
from lm.ablation.plan.compose import compose_arms
from lm.ablation.record import read_record
from lm.cli.compose import compose
from lm.cli.mistakes import CONFIGS
from lm.config import RunConfig
from lm.config.ablation import METRICS, AblateConfig
from lm.config.identity import flat

DOCS = Path(lm.__file__).parents[1] / "docs/studies"
STUDIES = sorted(path.parent for path in DOCS.rglob("ablation.json"))
PAGE = next(path for path in (DOCS / "tying/protocol.md", DOCS / "tying.md") if path.exists()).read_text()
CONDITIONS = re.findall(r"^\| `(\w+)` \| `(.+?)`", PAGE, re.MULTILINE)
WHOLE = re.findall(r"^python scripts/ablate.py (.+?)  # (\S+)$", PAGE.replace("\\\n ", ""), re.MULTILINE)
COMMANDS = {f"tying/{name}": f"ablation=tying_core {words}" for name, words in CONDITIONS}
COMMANDS |= {folder: words for words, folder in WHOLE}
# `recipe` was run from a copy of its text; the others are what was seen before, with settings that are no more
APART = {"recipe", "tying_pilot", "tying_trials"}
TUNED = {"recipe", "tying_broken"} | {
    f"tying/{name}"
    for name in ("main", "small", "longer_tuned", "adamw", "adamw_longer", "vocab_512", "vocab_8192", "shakespeare")
}
RUN = sorted({str(path.relative_to(DOCS)) for path in STUDIES} - APART)


def named(path: Path) -> str:
    return str(path.relative_to(DOCS))


def test_every_study_is_here() -> None:
    assert len(STUDIES) >= 19
    assert {named(path) for path in STUDIES} > APART


def differences(path: Path, metric: str, one: Contrast) -> tuple[tuple[str, ...], list[float]]:
    """The runs that a comparison rests on, and its paired differences, straight from results.csv."""
    with open(path / "results.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["purpose"] == "reported" and row["status"] == "done"]
    ours, theirs = (
        {int(row["seed"]): row for row in rows if row["arm"] == arm and one.budget in row["budgets"].split()}
        for arm in (one.arm, one.baseline)
    )
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    runs = tuple(sorted(row["run_dir"] for pair in pairs for row in pair))
    return runs, [float(a[metric]) - float(b[metric]) for a, b in pairs]


def student(values: list[float], noise: tuple[float, float]) -> Any:
    """The distribution of the true mean, given the values and the noise of tuning (its standard deviation, its df)."""
    seeds, (sd, df) = stats.sem(values) ** 2, noise
    n_free = (seeds + sd**2) ** 2 / (seeds**2 / (len(values) - 1) + sd**4 / df)
    return stats.t(n_free, np.mean(values), (seeds + sd**2) ** 0.5)


def verdicts(
    family: dict[Any, list[float]], noise: dict[Any, tuple[float, float]], margin: float, sign: int
) -> dict[Any, tuple[Any, ...]]:
    """Mean, 95 % interval and verdict of each comparison of a family, corrected by Holm's method."""
    tested = {key: student(values, noise[key]) for key, values in family.items() if len(values) > 1}
    different = {key: 2 * min(found.cdf(0), found.sf(0)) for key, found in tested.items()}
    equivalent = {key: max(found.cdf(-margin), found.sf(margin)) for key, found in tested.items()}

    def rejected(ps: dict[Any, float]) -> set[Any]:
        found = set()
        for i, key in enumerate(sorted(ps, key=ps.__getitem__)):
            if ps[key] * (len(ps) - i) > 0.05:
                break
            found.add(key)
        return found

    same, apart, found = rejected(equivalent), rejected(different), {}
    for key, one in tested.items():
        mean = one.mean()
        direction = "better" if sign * mean < 0 else "worse"
        verdict = "equivalent" if key in same else direction if key in apart else "undecided"
        found[key] = (mean, *one.interval(0.95), verdict)
    return found


@pytest.mark.parametrize("path", STUDIES, ids=named)
def test_what_is_said_of_a_study_follows_from_its_rows(path: Path) -> None:
    study = read_study(path)
    contrasts, margin = study.contrasts(), study.record.equivalence_margin
    assert contrasts
    for primary in (True, False):
        mine = [one for one in contrasts if one.primary is primary]
        rows = [differences(path, study.metric, one) for one in mine]
        noise = {
            runs: (one.comparison.tuning_sd, one.tuning.df if one.tuning else 1)
            for one, (runs, _) in zip(mine, rows, strict=True)
        }
        assert any(sd for sd, _ in noise.values()) == (named(path) in TUNED and bool(noise))
        expected = verdicts(dict(rows), noise, margin, 1 if METRICS[study.metric][0] else -1)
        for one, (runs, values) in zip(mine, rows, strict=True):
            assert one.differences == pytest.approx(values)
            if len(values) < 2:
                assert one.comparison.verdict == "undecided"
                continue
            mean, low, high, verdict = expected[runs]
            found = one.comparison
            assert (found.mean, found.ci_low, found.ci_high) == pytest.approx((mean, low, high))
            assert found.verdict == verdict or one.diverged
            assert_said(study.say(one), one, f"{abs(mean):.{decimals(margin)}f}")


def assert_said(sentence: str, one: Contrast, size: str) -> None:
    words = {"better": "is better than", "worse": "is worse than", "equivalent": "are equivalent"}
    assert words.get(one.comparison.verdict, "undecided") in sentence
    assert one.arm in sentence
    assert one.baseline in sentence
    assert size in sentence
    assert f"{one.comparison.n} seeds" in sentence


@pytest.mark.parametrize("name", some(RUN, 4))
def test_the_command_that_the_page_gives_asks_for_the_runs_that_are_there(name: str) -> None:
    """Whatever the defaults have become since: otherwise the rows would not count and all would run again."""
    words = shlex.split(COMMANDS[name])
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        asked = [word for word in words if word.lstrip("+~").startswith("ablation")]
        config = compose("ablate", [*asked, "ablation.name=any"], AblateConfig)
        others = [word for word in words if word not in asked]
        runs = compose_arms(config.ablation, others, lambda words: compose("train", words, RunConfig))
    record = read_record(DOCS / name)
    assert runs.keys() == record.arms.keys()
    assert config.ablation.seeds == record.seeds
    for arm, run in runs.items():
        known = record.arms[arm]
        settings = flat(asdict(run) | {"logger": {}}) | known.matched
        different = {key: (value, settings[key]) for key, value in known.settings.items() if settings[key] != value}
        assert different.keys() <= {"threads", "trainer.enable_progress_bar", "data.cache_dir"}
