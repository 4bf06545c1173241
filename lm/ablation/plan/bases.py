"""The runs that all arms start from, one for each seed: trained first, in the ablation's own folder."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lm.ablation.outcomes import Outcomes
from lm.ablation.plan.arms import Arm, Arms, build_lone_arm, check_start
from lm.ablation.plan.cells import Cell, cell
from lm.ablation.record import BaseRecord
from lm.config import BadInput, RunConfig
from lm.config.ablation import AblationConfig
from lm.config.checks import about
from lm.formats.base import read_base

NAME = "base"
NOT_TRAINED = "not trained yet"  # in place of the hash of the weights


@dataclass(slots=True)
class Bases:
    """`arm` has the configuration of the base runs; `before` is what an earlier call knew of them, by run_dir."""

    arm: Arm
    outcomes: Outcomes
    before: dict[str, BaseRecord]
    hashes: dict[str, str] = field(default_factory=dict)  # run_dir -> hash of the weights

    def cell(self, seed: int) -> Cell:
        return cell(self.arm, seed, self.arm.steps["own"], {}, "bases")

    def start(self, seed: int) -> dict[str, Any]:
        """The settings with which an arm starts from the base of its seed."""
        one = self.cell(seed)
        return {"init_from": str(self.outcomes.folder / one.run_dir), "init_sha256": self.sha256(one) or NOT_TRAINED}

    def sha256(self, one: Cell) -> str | None:
        """Of the weights of a finished base, also of one that is a line of the record and whose folder is gone."""
        if one.run_dir not in self.hashes and self.outcomes.of(one.run_dir, one.identity).status == "done":
            self.hashes[one.run_dir] = read_base(str(self.outcomes.folder / one.run_dir)).sha256
        before = self.before.get(one.run_dir)
        return self.hashes.get(one.run_dir) or (before.sha256 if before else None)

    def record(self, seeds: Iterable[int]) -> list[BaseRecord]:
        found = []
        for one in map(self.cell, seeds):
            loss = self.outcomes.of(one.run_dir, one.identity).result.get("val_loss")
            now = BaseRecord(one.seed, one.run_dir, self.sha256(one), loss)
            found.append(self.before.get(one.run_dir, now) if loss is None else now)
        return found


def build_bases(
    config: AblationConfig,
    run: RunConfig | None,
    arms: Arms,
    outcomes: Outcomes,
    before: list[BaseRecord],
    threads: int,
    quiet: bool,
) -> Bases | None:
    """And let the arms start from them. Raises BadInput if an arm cannot."""
    if run is None:
        return None
    with about("ablation.base"):
        arm = build_lone_arm(NAME, config.base or [], run, threads, quiet)
    bases = Bases(arm, outcomes, {one.run_dir: one for one in before})
    for name, one in arms.items():
        if one.identity["tokenizer_hash"] != arm.identity["tokenizer_hash"]:
            raise BadInput(f"ablation.arms.{name}: has another tokenizer than ablation.base")
        check_start(one, arm.run.model, arm.run.head, arm.run.data.seq_len)
        one.start = bases.start
    return bases
