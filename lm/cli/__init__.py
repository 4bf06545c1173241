"""The command line: arguments to a dataclass of lm.config, errors to one line.

In: the arguments of a command. Out: a call of one function of another package, then an exit code (0, 1, 2, 130, 143).
Imports every package of lm; torch and Lightning only after the settings have been checked.
"""
