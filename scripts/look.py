"""Look at runs in a browser: python scripts/look.py run_dir=RUN, run_dir=[RUN1,RUN2] or folder=runs"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code of this checkout

from lm.cli.main import main

if __name__ == "__main__":
    main("look")
