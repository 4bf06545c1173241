"""The laboratory on top of the core: ablation, formats, sources, measures, runs, look.

The lab imports the core; the core names parts of the lab only as text and runs without them.
"""
