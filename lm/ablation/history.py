"""What a later call must not pass over: verdicts that were seen, and finished runs that would be thrown away."""

from typing import TYPE_CHECKING, Any

from lm.ablation.contrasts import ENDED
from lm.ablation.record import REPORTED, AblationRecord, ArmRecord, design_of
from lm.ablation.results import RunReader, results_of
from lm.config.identity import differences

CHANGED = {"source_hash": "code", "data_hash": "text", "tokenizer_hash": "tokenizer"}

if TYPE_CHECKING:
    from lm.ablation.plan import Plan, Step


def designs_seen(before: AblationRecord, reader: RunReader) -> list[dict[str, Any]]:
    """Those of earlier calls with which there was a verdict to see: when it ended, or in a report on the way."""
    seen, design = before.designs_seen, design_of(before)
    is_shown = before.ended or (not before.analyses and (reader.folder / "report.html").exists())
    if not is_shown or design in seen or not (results_of(before, reader).contrasts.n_seeds > 1).any():
        return seen
    return [*seen, design]


def lost_to_new_code(plan: "Plan", step: "Step") -> str:
    """In words, the finished runs of an ablation that has ended which other code or text alone would make again."""
    before, seeds, budgets = plan.before, plan.config.seeds, {*plan.config.budgets}
    if not (before.ended or before.analyses) or before.tune != plan.config.tune or not step.missing:
        return ""
    changed = [
        (run.arm, hashes)
        for run in before.of(REPORTED)
        if run.arm in plan.arms and run.seed in seeds and not budgets.isdisjoint(run.budgets)
        if (hashes := _changed(before.arms[run.arm], plan.arms[run.arm]))
        if plan.reader.outcome(run.run_dir).status in ENDED
    ]
    if not changed:
        return ""
    arms, what = (", ".join(dict.fromkeys(names)) for names in zip(*changed, strict=True))
    return (
        f"{len(changed)} finished run{'s' * (len(changed) > 1)} ({arms}) no longer count, for the {what} has changed "
        "since; report.py still shows their verdict; to make them again here: code=new, elsewhere: another output_dir="
    )


def _changed(before: ArmRecord, now: ArmRecord) -> str:
    """What has changed, if it is the code or the text and nothing else; empty if not."""
    changed = {key for key in now.identity if now.identity[key] != before.identity.get(key)}
    keys = before.settings.keys() & now.settings.keys()  # other code may have other settings
    first, second = ({key: arm.settings[key] for key in keys} for arm in (before, now))
    if not changed <= {*CHANGED} or differences(first, second, ignored=("threads",)):
        return ""
    return " and the ".join(CHANGED[key] for key in CHANGED if key in changed)
