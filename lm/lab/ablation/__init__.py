"""An ablation: a question, arms that differ in one thing, and an answer with its uncertainty.

In: a Question and a RunConfig for each arm. Out: a folder with a run for each arm and seed, and a report.

The life of a question: `ask` makes a `question` of a line, a file or a finished ablation, and composes its arms. `arms`
checks and counts them. `ablate` is the program: while `plan.next_runs` says what is missing (`tuning` says which values
of a tuned setting), `execute` makes it. `folder` reads what there is as one frame, and `results` holds the frame with
the verdicts of `judge`, each with its `sentence`. `report`, `figures` and `warnings` show them. `rows` judges the
numbers of other programs, and `compare` is the door for Python.
"""
