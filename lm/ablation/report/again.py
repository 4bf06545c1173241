"""The end of a report: which runs have no result and why, and how to reproduce the ablation."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from lm.ablation.judge.study import Row, Study
from lm.ablation.record import AblationRecord
from lm.ablation.report.answer import BUDGET_NAMES
from lm.ablation.report.arms import spent
from lm.ablation.report.conditions import made_with
from lm.ablation.run_files import RunFiles
from lm.report.page import code, fence, plain, table

HASHES = ("data_hash", "tokenizer_hash", "source_hash")


def losses_section(study: Study) -> list[str]:
    parts = []
    if broken := [row for row in [*study.rows, *study.trials] if row.status in ("failed", "diverged")]:
        rows = [[*who(row), row.status, plain(row.error), code(f"{row.run_dir}.log")] for row in broken]
        parts.append(table(["arm", "seed", "purpose", "status", "error", "log"], rows))
        parts.append("The same command repeats a run that failed, but not one that diverged: it would diverge again.")
    if missing := [row for row in study.rows if row.status == "missing"]:
        rows = [[*who(row), state(study, row)] for row in missing]
        parts.append(table(["arm", "seed", "purpose", "progress"], rows))
    return ["## Runs without a result", *parts] if parts else []


def who(row: Row) -> list[str]:
    served = f"equal {' and '.join(BUDGET_NAMES[one] for one in row.budgets)}" if row.budgets else "search trial"
    return [plain(row.arm), str(row.seed), served]


def state(study: Study, row: Row) -> str:
    made = RunFiles(study.outcomes.folder / row.run_dir).steps()
    return f"step {made:,} of {row.steps:,}, running or interrupted" if made else "not started"


def again_section(study: Study) -> list[str]:
    record, done = study.record, [row for row in study.rows if row.result]
    seeds, resumed = ", ".join(map(str, record.seeds)), sum(bool(row.result.get("resumed_from")) for row in done)
    tuned = f"; search trials {', '.join(map(str, record.tune.seeds))}" if record.tune.trials else ""
    sizes = {arm.identity["data_hash"]: (arm.train_tokens, arm.val_tokens) for arm in record.arms.values()}
    text = "; ".join(f"{train:,} training tokens, {val:,} validation tokens" for train, val in sizes.values())
    facts = [
        ["started, ended", plain(f"{record.begun}, {record.ended or 'not yet'}")],
        ["machine of the last call", plain(f"{record.machine}; runs in parallel: {record.workers}")],
        *([what, plain(value)] for what, value in made_with(study)),
        ["seeds", f"{seeds}{tuned}"],
        *bases(record),
        ["text", text],
        *hashes(study),
        ["resumed after an interruption", f"{resumed} of {len(done)}"],
        ["computing time", f"reported runs {spent(study.rows)}; search trials {spent(study.trials)}"],
    ]
    report = re.sub(r"ablate(\.py)?\b.*", r"report\1", record.command, flags=re.DOTALL)
    return [
        "## How to reproduce this",
        fence(record.command),
        table(["what", "value"], facts),
        "The folder of the ablation contains `cells/`, a directory (settings, metrics, model, result) and a log for "
        "each run; `trials/`, the same for the search trials; `ablation.json`, the plan with every setting of every "
        "arm; `results.csv`, a row for each run; and `report.json`, the numbers of this report. This command, with the "
        "path of the folder, updates the report, also while runs go on:",
        fence(f"{report} {shlex.quote(f'output_dir={named(study.outcomes.folder)}')}"),
    ]


def named(folder: Path) -> str:
    """A relative path as it was given, an absolute one from the working directory if it lies below, else its last name.

    A report that is published thus says nothing of the machine's other folders; the last name needs its path again.
    """
    below = folder.is_relative_to(Path.cwd())
    return str(folder.relative_to(Path.cwd()) if below else folder.name if folder.is_absolute() else folder)


def bases(record: AblationRecord) -> Iterator[list[str]]:
    """The models that the arms start from."""
    for one in record.bases:
        if one.val_loss is not None:
            made = f"{code(one.run_dir)}: loss {one.val_loss:.4f}, weights {code((one.sha256 or '')[:16])}"
            yield [f"base of seed {one.seed}", made]


def hashes(study: Study) -> Iterator[list[str]]:
    """A line each for text, tokenizer and source if all arms share them, else one for each that there is."""
    for key in HASHES:
        users: dict[str, list[str]] = {}
        for name, arm in study.record.arms.items():
            users.setdefault(arm.identity[key], []).append(name)
        for value, names in users.items():
            whose = f" ({plain(', '.join(names))})" if len(users) > 1 else ""
            yield [f"{key.removesuffix('_hash')} hash{whose}", code(value[:16])]
