"""Continue a prompt: python scripts/generate.py run_dir=RUN "prompt=def f(x, y):" [max_new_tokens=N] [temperature=T]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code of this checkout

from lm.cli.main import main

if __name__ == "__main__":
    main("generate")
