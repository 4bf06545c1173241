"""The fault campaign: python -m tests.faults kills commands and lets their file operations fail.

docs/reliability.md describes it. `commands` has the commands and what they do undisturbed, `case` disturbs one of them.
"""
