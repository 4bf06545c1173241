"""The fault campaign: python -m tests.faults kills commands and lets their file operations fail.

docs/reliability.md describes it. `campaign` has the commands and the cases that disturb one of them; `inject` lets a
file operation fail.
"""
