"""List runs with what differs between them: python scripts/runs.py [FOLDER] [where=QUERY] [sort=KEY]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code of this checkout

from lm.cli.main import main

if __name__ == "__main__":
    main("runs")
