"""The console command where it is not on the path: python -m lm COMMAND ..."""

from lm.cli.main import main

if __name__ == "__main__":
    main()
