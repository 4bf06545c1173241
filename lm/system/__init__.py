"""The machine: devices and threads, atomic files, tables in a terminal, the hash of the code that computes.

In: numbers, paths, text. Out: a device and a number of threads, tables, and files that are complete or absent.
Imports lm.errors, and torch in `device` alone.
"""
