"""An ablation: a question, arms that differ in one thing, and an answer with its uncertainty.

In: AblateConfig and a RunConfig for each arm. Out: a folder with a run for each arm and seed, and a report.
Four rooms: run imports plan, report imports judge; all read record.py and outcomes.py, and ablate.py calls all.
"""
