"""What every report is made of: Markdown and the page it becomes, how figures look, the curves of a run.

In: text, numbers, the metrics.csv of a run. Out: strings of HTML and SVG.
Imports lm.system and lm.config; matplotlib, not torch.
"""
