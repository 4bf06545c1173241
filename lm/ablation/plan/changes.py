"""Why finished runs in an ablation's folder no longer count."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from typing import Any

from lm.ablation.outcomes import Outcomes
from lm.ablation.plan.arms import Arms, sources_of
from lm.ablation.record import AblationRecord, CellRecord
from lm.config.identity import hashed_settings

Planned = Sequence[CellRecord]
MOST = 3  # names of files or settings that are told
WHAT = {"data_hash": "text", "tokenizer_hash": "tokenizer", "source_hash": "training code"}


def set_aside(before: AblationRecord, planned: Planned, arms: Arms, outcomes: Outcomes) -> dict[str, str]:
    """By run_dir, why a finished run that an earlier plan asked for is asked for no more."""
    known, asked = {one.run_dir: one for one in before.cells}, {one.run_dir for one in planned}
    gone = [one for one in outcomes.ended() if one.startswith("cells/") and one not in asked]
    done = [one for one in gone if outcomes.of(one).result]
    found = {one: before.set_aside.get(one, "an earlier plan asked for them") for one in done}
    return found | {one: reason(before, known[one], planned, arms) for one in found if one in known}


def reason(before: AblationRecord, run: CellRecord, planned: Planned, arms: Arms) -> str:
    same = [one for one in planned if (one.arm, one.seed) == (run.arm, run.seed)]
    if not same:
        return f"the {'seed' if run.arm in arms else 'arm'} is no longer asked for"
    old, new = before.arms[run.arm], arms[run.arm]
    files = named(before.sources, sources_of(arms)) if before.sources else ""
    changed = [key for key, value in old.identity.items() if new.identity[key] != value]
    found = [f"the {WHAT.get(key, key)} changed{files * (key == 'source_hash')}" for key in changed]
    if others := named(hashed_settings(old.settings), hashed_settings(new.settings)):
        found.append(f"settings changed{others}")
    if not found and old.tuned != new.tuned:
        return f"the tuned settings changed{named(old.tuned, new.tuned)}"
    if not found and all(one.steps != run.steps for one in same if one.budget == run.budget):
        return "the number of steps changed"
    if not found and before.bases:
        return "the run that it starts from changed"
    return "; ".join(found) or "its settings had other names"


def named(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The keys whose values differ, in brackets; nothing where none does."""
    names = sorted(key for key in old.keys() | new.keys() if old.get(key, MISSING) != new.get(key, MISSING))
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return f" ({', '.join(names[:MOST])}{more})" if names else ""
