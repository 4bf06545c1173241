"""The command line: arguments to a dataclass of lm.config, exceptions to one line and an exit code.

In: the arguments of a command. Out: a call of one function of another package, then an exit code.
Imports every package of lm; torch and Lightning only after the settings have been checked.
"""
