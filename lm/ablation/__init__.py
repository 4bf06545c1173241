"""An ablation: a question, arms that differ in one thing, and an answer with its uncertainty.

In: AblateConfig and a RunConfig for each arm. Out: a folder with a run for each arm and seed, and a report.
Imports lm.training and the packages below it. Of its four packages, run imports plan and report
imports judge; all import record.py and outcomes.py, and ablate.py calls all of them.
"""
