"""Runs at a glance: a list of those below a folder, with what differs between them, their curves, a page about one.

In: run directories, finished or not. Out: tables, CSV, a picture, report.html.
Imports lm.lab.report, lm.training's readers of a run directory and lm.lab.ablation.folder; not torch, and
matplotlib late.
"""
