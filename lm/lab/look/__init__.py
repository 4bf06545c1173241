"""Runs in a browser: prompts continued token by token, losses as colours, attention, curves while they grow.

In: run directories, finished or not. Out: a page on the loopback address, and JSON for it.
Imports lm.lab.runs and the layers below it, torch, and of the standard library the HTTP server; not Lightning or Hydra.
"""
