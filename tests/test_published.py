"""The studies under docs/: every contrast that a report prints follows from the rows of its results.csv."""

import csv
import json
import re
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from scipy import stats

import lm
from lm.ablation.judge.study import read_study
from lm.ablation.plan.compose import compose_arms
from lm.ablation.report.answer import answer
from lm.ablation.report.contrasts import contrasts_table
from lm.ablation.restore import restore
from lm.cli.errors import CONFIGS
from lm.cli.launch import compose
from lm.config import RunConfig
from lm.config.ablation import AblateConfig
from lm.config.identity import flat

DOCS = Path(lm.__file__).parents[1] / "docs/studies"
STUDIES = sorted(DOCS.rglob("report.md"))
PAGE = (DOCS / "tying.md").read_text()
CELLS = re.findall(r"^\| `(\w+)` \| `(.+?)`", PAGE, re.MULTILINE)
WHOLE = re.findall(r"^python scripts/ablate.py (.+?)  # (\S+)$", PAGE.replace("\\\n ", ""), re.MULTILINE)
COMMANDS = {f"tying/{name}": f"ablation=tying_core {words}" for name, words in CELLS}
COMMANDS |= {folder: words for words, folder in WHOLE}
# `recipe` was run from a copy of its text; the others are what was seen before, with settings that are no more
APART = {"recipe", "tying_pilot", "tying_trials"}
RUN = sorted({str(path.parent.relative_to(DOCS)) for path in DOCS.rglob("ablation.json")} - APART)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_a_report_prints_what_its_rows_give(path: Path) -> None:
    record, report = json.loads(path.with_name("ablation.json").read_text()), path.read_text()
    with open(path.with_name("results.csv"), newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["purpose"] == "reported" and row["status"] == "done"]
    printed = [line.strip("| ").replace("*", "").split(" | ") for line in report.splitlines() if line[:1] == "|"]
    several = len(record["budgets"]) > 1
    for budget in record["budgets"]:
        for arm, other in record["contrasts"].items():
            ours, theirs = (
                {
                    row["seed"]: float(row[record["metric"]])
                    for row in rows
                    if row["arm"] == name and budget in row["budgets"]
                }
                for name in (arm, other)
            )
            seeds = sorted(ours.keys() & theirs.keys())
            if len(seeds) < 2:
                continue
            test = stats.ttest_rel([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
            low, high = test.confidence_interval(0.95)
            mean = sum(ours[seed] - theirs[seed] for seed in seeds) / len(seeds)
            where = [{"flops": "FLOPs"}.get(budget, budget)] if several else []
            line = [arm, other, *where, str(len(seeds)), f"{mean:+.4f}", f"{low:+.4f} to {high:+.4f}"]
            assert line in [cells[: len(line)] for cells in printed]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_its_answer_and_verdicts_are_those_of_its_rows(path: Path, tmp_path: Path) -> None:
    for name in ("ablation.json", "results.csv"):
        shutil.copy(path.with_name(name), tmp_path)
    restore(tmp_path)
    study = read_study(tmp_path)
    contrasts, report = study.contrasts(), path.read_text()
    assert "\n\n".join(answer(study, contrasts)) in report
    if any(one.seeds for one in contrasts):
        assert contrasts_table(study, contrasts) in report


@pytest.mark.parametrize("name", RUN)
def test_the_command_that_the_page_gives_asks_for_the_runs_that_are_there(name: str) -> None:
    """Whatever the defaults have become since: otherwise the rows would not count and all would run again."""
    words = shlex.split(COMMANDS[name])
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        asked = [word for word in words if word.lstrip("+~").startswith("ablation")]
        config = compose("ablate", [*asked, "ablation.name=any"], AblateConfig)
        others = [word for word in words if word not in asked]
        runs = compose_arms(config.ablation, others, lambda words: compose("train", words, RunConfig))
    record = json.loads((DOCS / name / "ablation.json").read_text())
    assert runs.keys() == record["arms"].keys()
    assert config.ablation.seeds == record["seeds"]
    for arm, run in runs.items():
        known = record["arms"][arm]
        settings = flat(asdict(run)) | known["matched"]
        different = {key: (value, settings[key]) for key, value in known["settings"].items() if settings[key] != value}
        assert different.keys() <= {"threads", "trainer.enable_progress_bar"}
