"""An ablation: a question, arms that differ in one thing, and an answer with its uncertainty.

In: AblateConfig and a RunConfig for each arm. Out: a folder with a run for each arm and seed, and a report.

The life of a question: `lm.lab.commands.question` composes its arms; `ablate` is the program. `arms` checks
and counts them, and `plan` names their runs: `next_runs` says which are next, among them what `tuning` tries
on a `response_surface`. `executors` makes them, `record` keeps what was planned, and `results` reads both as
one frame. `contrasts` compares, by the tests of `statistics`; `warnings` says what weakens an answer;
`report` and `figures` show it. `rows` judges the numbers of other programs.
"""
