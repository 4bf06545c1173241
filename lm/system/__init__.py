"""The machine: devices and threads, atomic files, tables in a terminal.

In: numbers, paths, text. Out: a device and a number of threads, tables, and files that are complete or absent.
Imports lm.config, and torch in `device` alone.
"""
