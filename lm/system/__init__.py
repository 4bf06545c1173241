"""The machine: devices and threads, atomic files, tables in a terminal.

In: numbers, paths, text. Out: the same on every platform, and files that are complete or absent.
Imports lm.config, and torch in `device` alone.
"""
