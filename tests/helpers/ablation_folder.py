"""Folders of runs and ablations made by hand, whole, broken or on the way, and a report as its readers see it."""

import json
import math
import os
import random
import re
from dataclasses import asdict, replace
from html import unescape
from types import MappingProxyType

import yaml

from lm.config import REQUESTED, flat
from lm.lab.ablation.folder import AblationRecord, ArmRecord, Run, RunFiles, write_record
from lm.lab.ablation.question import Question
from lm.lab.ablation.report import write_report
from lm.lab.ablation.results import read_results
from lm.lab.ablation.tuning import LADDER, factor
from lm.system.code import code_identity
from tests.helpers.tiny import WHOLE_RESULT

ARMS = {"tied": 3.50, "untied": 3.53, "untied_matched": 3.502, "tied_naive": 4.4}  # and what they come to
METRICS = ("step", "tokens", "lr", "train/loss", "train/grad_norm", "val/loss", "val/bpb", "val/top1", "val/tokens")
SIZES = {"n_params": 1_017_472, "flops_per_token": 6_000_000, "steps": 1000, "tokens_per_step": 1024}
SIZES |= {"seconds_per_step": 0.09, "vocab_size": 2048, "scored_tokens": [89_999]}
WHOLE = 89_999  # tokens of the validation text that are scored
CRACK = "RuntimeError: a | <b>crack</b>"
BROKEN = {("tied_naive", 2): "diverged", ("tied_naive", 1): "failed", ("untied_matched", 2): "running"}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def lines(*rows):
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def write_run_dir(path, run, result=None, **hashes):
    """A run that is no ablation's, with a curve of three points, and a result if it is finished."""
    hashes = dict.fromkeys(("data_hash", "tokenizer_hash", "config_hash"), "x") | hashes
    run = replace(run, trainer=replace(run.trainer, max_steps=40))
    begun = {"requested": {key: flat(asdict(run))[key] for key in REQUESTED}, "code": code_identity()}
    begun |= {"states": {}, "started_in": os.path.relpath(os.curdir, path)}
    write(path / "config.yaml", yaml.safe_dump(asdict(run) | begun | hashes))
    loss = (result or {}).get("val_loss", 3.5)
    rows = [(step, 128 * step, loss + 1 / step) for step in (10, 20, 30)]
    write(path / "metrics.csv", lines(("step", "tokens", "val/loss"), *rows))
    if result:
        write(path / "result.json", WHOLE_RESULT | result)


def write_result(path, **changes):
    write(path / "result.json", WHOLE_RESULT | changes)


def write_reported(path, run, broken):
    """A run that is done, with a curve of ten points, or what became of it."""
    chance = random.Random(f"{run.arm} {run.seed}")
    loss = ARMS[run.arm] + 0.01 * run.seed + chance.gauss(0, 0.002) + 0.1 * math.log2(run.factor) ** 2
    end = BROKEN.get((run.arm, run.seed)) if broken else None
    if end == "running":
        write(path / "metrics.csv", lines(("step", "tokens"), (70, 71680)))
        return
    if end:
        path.parent.mkdir(parents=True, exist_ok=True)
        RunFiles(path).write_status(end, CRACK)
        return
    score = {"val_loss": loss, "val_bpb": loss / 2.23, "val_top1": 0.42 - loss / 30}
    write_result(path, **score, seed=run.seed, steps=1000, tokens=1_024_000, seconds=90 * chance.uniform(0.95, 1.05))
    metrics = []
    for step in range(100, 1001, 100):
        now = loss + 4 * math.exp(-step / 200) + chance.gauss(0, 0.01)
        metrics.append([step, step * 1024, 0.001, now - 0.1, 1.2, now, now / 2.23, 0.42 - now / 30, WHOLE])
    write(path / "metrics.csv", lines(METRICS, *metrics))


def question(**changes):
    settings = {
        "name": "test",
        "question": "?",
        "arms": {"tied": ["head=tied"], "untied": ["head=untied"]},
        "baseline": "tied",
        "seeds": [0, 1],
        "equivalence_margin": 0.01,
        "primary": ["untied"],
        "folds": False,
    }
    return Question(**(settings | changes))


def make(
    path,
    done=lambda arm, seed: True,
    seeds=(0, 1, 2),
    tuned=False,
    broken=False,
    report=True,
    settings=MappingProxyType({}),
    **changes,
):
    """An ablation's folder: four arms of equal tokens; if tuned, the best value of each is its configuration's."""
    overrides = {arm: [f"head={arm.partition('_')[0]}"] for arm in ARMS}
    overrides["untied_matched"].append("model.n_layers=3")
    asked = {
        "name": "tying",
        "question": "Should a small model tie its LM head?",
        "arms": overrides,
        "seeds": [*seeds],
        "primary": [*ARMS][1:3],
        "tune": "true" if tuned else None,
        "match_parameters": {"untied_matched": "model.d_ff"},
        "overrides": ["trainer.max_steps=1000"],
    }
    arms = {
        arm: ArmRecord(
            overrides=overrides[arm],
            settings={
                "validation.every": 100,
                "head.untie_at": None,
                "optim.betas": [0.8, 0.95],
                "optim.lr": 0.1 * i,
                **settings,
            },
            matched={"model.d_ff": 200} if arm == "untied_matched" else {},
            is_tuned=tuned,
            identity={"data_hash": "d" * 64, "tokenizer_hash": "t" * 64, "source_hash": "s" * 64},
            **SIZES,
        )
        for i, arm in enumerate(ARMS, 1)
    }
    runs = [
        Run(arm=arm, seed=seed, factor=by, run_dir=f"runs/{arm}-seed{seed}-{1000 * by:.0f}")
        for arm in ARMS
        for seed in seeds
        for by in ([factor(rung) for rung in LADDER] if tuned else [1.0])
    ]
    for run in runs:
        if done(run.arm, run.seed):
            write_reported(path / run.run_dir, run, broken)
    about = {"begun": "2026-01-31 12:00+00:00", "machine": "Linux x86_64, 0 GPUs", "command": "ablate 'a=``x``'"}
    path.mkdir(parents=True, exist_ok=True)
    write_record(AblationRecord(question=question(**asked | changes), arms=arms, runs=runs, **about), path)
    if report:
        write_report(read_results(path))
    return path


def numbers(path):
    """report.json, which must be JSON in the strict sense."""

    def refuse(word):
        raise AssertionError(word)

    return dict(json.loads((path / "report.json").read_text(), parse_constant=refuse))


class Page:
    """A page as its reader sees it: headings, and words without those of the figures; and its tags and addresses."""

    def __init__(self, path):
        content = (path / "report.html" if path.is_dir() else path).read_text()
        self.tags = re.findall(r"<(\w+)", content)
        self.addresses = re.findall(r'(?:src|href)="(.*?)"', content)
        self.is_written_again = 'http-equiv="refresh"' in content
        shown = re.sub(r"<(svg|style|title)\b.*?</\1>", "", content, flags=re.DOTALL)
        self.headings = [words(heading) for heading in re.findall(r"<h[1-3].*?>(.*?)</h[1-3]>", shown, re.DOTALL)]
        self.text = words(shown)


def words(content):
    return " ".join(unescape(re.sub("<[^>]*>", "", content)).split())
