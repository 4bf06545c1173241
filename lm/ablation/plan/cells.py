"""From arms to runs: how long each arm trains under each budget, and every run by its name."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lm.ablation.plan.arms import Arm
from lm.ablation.plan.match import change
from lm.config import RunConfig
from lm.config.ablation import AblationConfig
from lm.config.identity import config_hash

SAME_COST = {"tokens": 0.0, "flops": 0.02, "time": 0.02}  # costs of a step that differ by less count as equal


@dataclass(slots=True, frozen=True)
class Cell:
    """One run of an ablation. Its name ends in the hash of all that decides it: what has changed has another name."""

    arm: str
    seed: int
    name: str
    run: RunConfig
    tuned: dict[str, float]
    identity: dict[str, str]


def set_steps(config: AblationConfig, arms: dict[str, Arm]) -> None:
    """How long each arm trains, so that it spends what the arm it is compared with spends.

    A schedule that decays to the end cannot be read early, so each budget is a run of its own length.
    """
    for name, arm in arms.items():
        base = arms[config.root(name)]
        tokens = base.steps["own"] * base.tokens_per_step / arm.tokens_per_step
        costs = {
            "tokens": 1.0,
            "flops": base.flops_per_token / arm.flops_per_token,
            "time": (base.seconds_per_step / base.tokens_per_step) / (arm.seconds_per_step / arm.tokens_per_step),
        }
        for budget in config.budgets:
            ratio = costs[budget] if abs(costs[budget] - 1) > SAME_COST[budget] else 1.0
            arm.steps[budget] = max(1, round(tokens * ratio))


def cells(config: AblationConfig, arm: Arm) -> Iterator[tuple[str, Cell]]:
    """(budget, cell) for each budget and reported seed; a run that serves two budgets has one name."""
    for budget in config.budgets:
        for seed in config.seeds:
            yield budget, cell(arm, seed + config.seed_offsets.get(arm.name, 0), arm.steps[budget], arm.tuned)


def cell(arm: Arm, seed: int, steps: int, tuned: dict[str, float]) -> Cell:
    run = replace(arm.run, trainer={**arm.run.trainer, "max_steps": steps})
    run = change(run, {**tuned, "seed": seed, "max_tokens": None})
    identity = json.dumps({"config": config_hash(run), **arm.identity}, sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return Cell(arm.name, seed, f"{arm.name}-seed{seed}-{digest[:10]}", run, tuned, arm.identity)
