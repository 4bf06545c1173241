"""What is claimed by numbers: measurements, error rates of verdicts, a known effect, and a recipe below its n-gram."""

import json
import sysconfig
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lm.lab.ablation.folder import ArmRecord
from lm.lab.ablation.judge import judge, paired_test
from lm.lab.ablation.question import Question
from scripts.benchmark.error_rates import HARD, MARGIN, SHAPES, Cell, ladder, scores, simulate
from scripts.benchmark.run import SECTIONS
from tests.helpers.cases import some


@pytest.mark.nightly
def test_the_script_measures_every_section_prints_a_table_and_writes_json(script, tmp_path):
    answer = script("benchmark", "seconds=0", "output=out.json", "threads=2")
    assert answer.returncode == 0, answer.stderr
    for word in ("transformers", "without", "datasets.map", "memory bandwidth", "idle"):
        assert word in answer.stdout
    rows = json.loads((tmp_path / "out.json").read_text())["measurements"]
    assert {row["section"] for row in rows} == {*SECTIONS}
    assert min(row["value"] for row in rows if row["section"] == "limits") > 0


# --- the commands themselves


def write_modules(path, size):
    """Write so many characters of the standard library."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(module.read_text(encoding="utf-8", errors="ignore") for module in modules)
    path.write_text(text[:size], encoding="utf-8")


@pytest.mark.nightly
def test_a_known_effect_is_found_and_an_arm_is_not_better_than_itself(script, tmp_path):
    """A tied table of embeddings that begins at N(0, 1) starts far above ln V."""
    write_modules(tmp_path / "my.txt", 100_000)
    small = ("my.txt", "model=tiny", "trainer.max_steps=60", "trainer=cpu", "threads=1", "seeds=3", "json=true")
    for question, verdicts in (
        ("head=tied,tied_naive", {"worse"}),
        ("ablation=aa", {"undecided", "equivalent"}),
    ):
        answer = script("ablate", question, *small, f"output_dir={question.partition('=')[2]}", timeout=1200)
        assert answer.returncode == 0, answer.stderr
        assert {row["verdict"] for row in json.loads(answer.stdout)["answers"]} <= verdicts


@pytest.mark.nightly
def test_the_recipe_of_a_text_of_300_kb_is_below_its_n_gram_model(script, tmp_path):
    write_modules(tmp_path / "my.txt", 300_000)
    answer = script("train", "my.txt", "run_dir=run", timeout=1200)
    assert answer.returncode == 0, answer.stderr
    assert "experiment=bpe_300k" in answer.stderr
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["val_bpb"] < 0.95 * result["baselines_bpb"]["ngram"]


# --- the simulation of verdicts on tuned arms, in small; docs/statistics.md has the large one


@pytest.mark.parametrize("shape", some(SHAPES, 3))
def test_arms_of_unequal_curvature_get_few_false_verdicts_and_large_differences_are_found(shape):
    """With 60 repetitions a true rate of 0.05 is above 0.15 once in 600 cases."""
    rates = simulate(Cell(shape, ratio=4, apart=1, start="near", correlation=0.5), 60)
    for n in (5, 8):
        assert rates[f"false_{n}"] <= 0.15
        assert rates[f"covered_{n}"] >= 0.85
        assert max(rates[f"equivalent_worse_{n}"], rates[f"equivalent_better_{n}"]) <= 0.15
    assert rates["power4_8"] >= (0.6 if shape == "spikes" else 0.9)


def test_an_end_of_the_ladder_is_counted():
    """On a tilted cliff the loss falls right up to where training diverges."""
    rates = simulate(Cell("tilted cliff", ratio=1, apart=0, start="near", correlation=0.5), 60)
    assert rates["false_5"] <= 0.1


def frame(arms):
    """The reported runs of ladders: by arm the factors in powers of two, and the losses (seeds, factors)."""
    return pd.DataFrame(
        {
            "arm": arm,
            "seed": seed,
            "factor": float(2**x),
            "status": "done" if np.isfinite(loss) else "diverged",
            "val_loss": loss if np.isfinite(loss) else np.nan,
        }
        for arm, (factors, losses) in arms.items()
        for seed, of_seed in enumerate(losses)
        for x, loss in zip(factors, of_seed, strict=True)
    )


@pytest.mark.parametrize("shape", [*SHAPES, *HARD])
def test_the_simulation_has_the_numbers_that_a_frame_of_runs_gets(shape):
    """The simulation computes with arrays, because frames would take ten times as long."""
    cell, random = Cell(shape, ratio=4, apart=1, start="near", correlation=0.5), np.random.default_rng(0)
    names = ["base", "arm"]
    question = Question(
        name="aa",
        question="?",
        arms={name: [] for name in names},
        baseline="base",
        seeds=[*range(5)],
        equivalence_margin=MARGIN,
        tune="true",
    )
    for _ in range(3):
        of_seeds = random.standard_normal(5)
        arms = {
            name: ladder(cell, float(i), of_seeds, ratio, random)
            for i, (name, ratio) in enumerate(zip(names, (1, 4), strict=True))
        }
        (contrast,) = judge(question, frame(arms), {name: ArmRecord(is_tuned=True) for name in names})
        (base, up), (arm, down) = (scores(*arms[name]) for name in names)
        if not np.isfinite(arm - base).all():
            assert contrast.verdict == "undecided"
            continue
        test = paired_test([*(arm - base)], MARGIN, down, up)
        assert (contrast.ci_low, contrast.ci_high) == pytest.approx((test.low, test.high), rel=1e-9)
        assert (contrast.p, contrast.p_equivalent) == pytest.approx((test.p, test.p_equivalent), rel=1e-6)
