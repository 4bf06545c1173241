"""Train one run: python scripts/train.py [TEXT] [group=choice] [key=value ...]"""

from lm.cli.main import main

if __name__ == "__main__":
    main("train")
