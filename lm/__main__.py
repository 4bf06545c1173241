"""The console command where it is not on the path: python -m lm COMMAND ..."""

import sys

if __name__ == "__main__":
    # Python has put the current folder first, where a file of the user, such as random.py, would hide another module.
    sys.path.append(sys.path.pop(0))
    from lm.cli.main import main

    main()
