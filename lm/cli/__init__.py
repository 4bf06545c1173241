"""Comes in: the words of a command line.
Goes out: a call of one function of another room with a dataclass of lm.config, then an exit code (0, 1, 2, 130, 143).
May import: every room of lm; torch and Lightning only once the settings are known to be in order.
"""
