"""From finished runs to verdicts: differences paired by seed, intervals, tests, a sentence for each comparison.

In: the record and the outcomes in an ablation's folder. Out: Study, Contrast and Comparison; nothing is written.
Imports lm.ablation.record, lm.ablation.outcomes and lm.config; scipy, not torch.
"""
