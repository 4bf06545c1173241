"""From a question to runs: arms composed, checked, matched and timed, and every run by its name.

In: AblationConfig and a RunConfig for each arm. Out: Arm and Cell objects; nothing is trained or written.
Imports lm.ablation.record, lm.ablation.outcomes, lm.training and the packages below them.
"""
