"""Measurements of a run and of a text: diagnostics, losses by token and frequency, samples, leakage, speed."""
