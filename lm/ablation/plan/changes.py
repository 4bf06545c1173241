"""Why finished runs in an ablation's folder no longer count."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lm.ablation.outcomes import Outcomes
from lm.ablation.plan.arms import Arm
from lm.ablation.record import AblationRecord, ArmRecord, CellRecord
from lm.config.identity import identifying

MOST = 3  # names of files or settings that are told


def set_aside(
    before: AblationRecord | None, planned: Collection[CellRecord], arms: dict[str, Arm], outcomes: Outcomes
) -> dict[str, str]:
    """By run_dir, why a finished run that an earlier plan asked for is asked for no more."""
    asked = {one.run_dir for one in planned}
    plans = {one.run_dir: one for one in before.cells} if before else {}
    found = {}
    for run_dir in outcomes.names():
        if before and run_dir.startswith("cells/") and run_dir not in asked and outcomes.of(run_dir).result:
            why = before.set_aside.get(run_dir, "an earlier plan asked for them")
            found[run_dir] = reason(before, plans[run_dir], planned, arms) if run_dir in plans else why
    return found


def reason(before: AblationRecord, run: CellRecord, planned: Collection[CellRecord], arms: dict[str, Arm]) -> str:
    if run.arm not in arms or not any((one.arm, one.seed) == (run.arm, run.seed) for one in planned):
        return f"the {'seed' if run.arm in arms else 'arm'} is no longer asked for"
    old, new = before.arms[run.arm], arms[run.arm]
    if found := list(changes(old, new, before.sources, arms)):
        return "; ".join(found)
    if old.tuned != new.tuned:
        return f"the tuned settings changed{named(old.tuned, new.tuned)}"
    if not any((one.arm, one.budget, one.steps) == (run.arm, run.budget, run.steps) for one in planned):
        return "the number of steps changed"
    return "an earlier version of this program had other names for settings"


def changes(old: ArmRecord, new: Arm, sources: dict[str, str], arms: dict[str, Arm]) -> Iterator[str]:
    """What decides a run beside its seed and the program's own choices."""
    if old.identity["source_hash"] != new.identity["source_hash"]:
        used = {file for arm in arms.values() for file in arm.sources}
        gone = {file: "" for file in sources if file not in used}
        yield f"the training code changed{named(sources, new.sources | gone) if sources else ''}"
    for key, what in (("data_hash", "text"), ("tokenizer_hash", "tokenizer"), ("device", ""), ("precision", "")):
        if old.identity[key] != new.identity[key]:
            yield f"the {what or key} changed"
    if others := named(identifying(old.settings), identifying(new.settings)):
        yield f"settings changed{others}"


def named(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The keys whose values differ, in brackets; nothing where none does."""
    names = sorted(key for key in new if key not in old or old[key] != new[key])
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return f" ({', '.join(names[:MOST])}{more})" if names else ""
