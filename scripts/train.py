"""Train one run: python scripts/train.py [TEXT] [group=choice] [key=value ...]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code of this checkout

from lm.cli.main import main

if __name__ == "__main__":
    main("train")
