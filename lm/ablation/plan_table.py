"""A plan in the terminal: what would be run, and how long it would take."""

from lm.ablation.plan import Plan
from lm.ablation.warnings import plan_warnings
from lm.config.ablation import BUDGET_NAMES
from lm.system.terminal import duration, format_table, printable


def plan_table(plan: Plan) -> str:
    """Arms with what they cost, the runs, and how long all of it will take."""
    config, workers = plan.config, plan.record.workers
    head = [f"tokens at equal {BUDGET_NAMES[budget]}" for budget in config.budgets]
    rows = [["arm", "parameters", "FLOPs per token", "ms per step", *head]]
    for arm in plan.arms.values():
        tokens = [f"{arm.steps[budget] * arm.tokens_per_step:,}" for budget in config.budgets]
        cost = [f"{arm.n_params:,}", f"{arm.flops_per_token:,}", f"{1000 * arm.seconds_per_step:.0f}"]
        rows.append([arm.name, *cost, *tokens])
    lines = [config.question, "", format_table(rows), "", *_runs(plan)]
    lines += [f"{workers} at a time, {plan.record.threads} thread{'s' * (plan.record.threads > 1)} each"]
    if n := len(plan.stale_runs()):
        reason = "settings, text or code have changed, or they are not asked for any more"
        lines += [f"{n} finished run{'s' * (n > 1)} in this folder no longer count: {reason}"]
    lines += [f"{warning.summary} {warning.detail}" for warning in plan_warnings(plan.current_record())]
    least, most = plan.expected_seconds()
    time = duration(least) + (f" to {duration(most)}" if most > 1.05 * least else "")
    lines += [f"about {time} to go, as measured on this machine; all goes to {plan.reader.folder}"]
    return printable("\n".join(lines))


def _runs(plan: Plan) -> list[str]:
    reported = plan.run_records()
    missing = [run for run in reported if plan.reader.outcome(run.run_dir).status in ("missing", "failed")]
    lines = [f"{len(reported)} runs, {len(reported) - len(missing)} done"]
    if plan.config.looks:
        lines[0] += f", with looks at {', '.join(map(str, plan.config.looks))} seeds"
    if plan.n_seeds is not None:
        lines += [f"a look has decided with {plan.n_seeds} of {len(plan.config.seeds)} seeds: the others are not run"]
    least, most = plan.trials_to_make()
    if most:
        more = f" to {most}" if most > least else ""
        lines += [f"{least}{more} trials of hyperparameters: more than the least if a search has to go on or restart"]
    if plan.base:
        missing_bases = plan.missing([plan.base_spec(seed) for seed in plan.base_seeds()])
        lines += [f"{len(plan.base_seeds())} base runs, one for each seed, {len(missing_bases)} to be made"]
    if without_folder := sum(plan.reader.outcome(run.run_dir).row is not None for run in reported):
        lines += [
            f"finished runs without a folder, read from results.csv: {without_folder}; remove a row to run it again"
        ]
    return lines
