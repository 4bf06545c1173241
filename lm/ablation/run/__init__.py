"""Runs in processes of their own, several at a time, and the tuning that decides which runs to make.

In: Arm and Cell objects. Out: run directories under cells/ and trials/, and what each of them died of.
Imports lm.ablation.plan and the packages below it; neither judge nor report.
"""
