"""From arms to runs: how long each arm trains under each budget, and every run by its name."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from lm.ablation.plan.arms import Arm, Arms
from lm.ablation.plan.match import change
from lm.ablation.record import CellRecord
from lm.config import RunConfig
from lm.config.ablation import AblationConfig
from lm.config.identity import config_hash

SAME_COST = {"tokens": 0.0, "flops": 0.02, "time": 0.02}  # costs of a step that differ by less count as equal


@dataclass(slots=True, frozen=True)
class Cell:
    """One run of an ablation. Its name ends in the hash of all that decides it: what has changed has another name."""

    arm: str
    seed: int
    steps: int
    run_dir: str  # relative to the ablation's folder: cells/NAME, or trials/NAME
    run: RunConfig
    tuned: dict[str, float]
    identity: dict[str, str]  # what its result must say of itself: hashes of its settings, text, tokenizer, source


def set_steps(config: AblationConfig, arms: Arms) -> None:
    """How long each arm trains, so that it spends what the arm it is compared with spends.

    A schedule that decays to the end cannot be read early, so each budget is a run of its own length.
    """
    for name, arm in arms.items():
        base = arms[config.root(name)]
        tokens = base.steps["own"] * base.tokens_per_step / arm.tokens_per_step
        for budget in config.budgets:
            ratio = per_token(base, budget) / per_token(arm, budget)
            arm.steps[budget] = max(1, round(tokens * (ratio if abs(ratio - 1) > SAME_COST[budget] else 1)))


def per_token(arm: Arm, budget: str) -> float:
    return {"tokens": 1.0, "flops": arm.flops_per_token, "time": arm.seconds_per_step / arm.tokens_per_step}[budget]


def cells(config: AblationConfig, arms: Arms) -> list[tuple[CellRecord, Cell]]:
    """What is reported, arm by arm: each run, with a record for each budget that it serves."""
    found = []
    for name, arm in arms.items():
        for budget in config.budgets:
            for seed in config.seeds:
                one = cell(arm, seed + config.seed_offsets.get(name, 0), arm.steps[budget], arm.tuned)
                planned = CellRecord(name, seed, budget, one.run_dir, one.steps, one.identity["config_hash"])
                found.append((planned, one))
    return found


def cell(arm: Arm, seed: int, steps: int, tuned: dict[str, float], folder: str = "cells") -> Cell:
    start = arm.start(seed)
    key = (seed, steps, *tuned.items(), folder, *start.items())
    if key not in arm.cells:  # a thousand are asked for many times, and each takes milliseconds
        arm.cells[key] = build_cell(arm, seed, steps, tuned, folder, start)
    return arm.cells[key]


def build_cell(arm: Arm, seed: int, steps: int, tuned: dict[str, float], folder: str, start: dict[str, Any]) -> Cell:
    run = change(arm.run, {**tuned, "trainer.max_steps": steps, "seed": seed, "max_tokens": None, **start})
    settings = config_hash(run, arm.identity["data_hash"], arm.identity["tokenizer_hash"])
    decisive = json.dumps({"config": settings, **arm.identity}, sort_keys=True)
    name = f"{arm.name}-seed{seed}-{hashlib.sha256(decisive.encode()).hexdigest()[:10]}"
    return Cell(arm.name, seed, steps, f"{folder}/{name}", run, tuned, {"config_hash": settings, **arm.identity})
