"""An ablation: a question, arms that differ in one thing, and an answer with its uncertainty.

In: AblateConfig and a RunConfig for each arm. Out: a folder with a run for each arm and seed, and a report. As the data
goes: compose -> plan -> execute -> results -> contrasts -> report, and the tables in the terminal.
"""
