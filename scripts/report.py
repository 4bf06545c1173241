"""Write the report of an ablation, also while it is running: python scripts/report.py output_dir=DIR"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code of this checkout

from lm.cli.main import main

if __name__ == "__main__":
    main("report")
