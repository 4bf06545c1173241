"""Look at runs in a browser: python scripts/look.py run_dir=RUN, run_dir=[RUN1,RUN2] or folder=runs"""

from lm.cli.main import main

if __name__ == "__main__":
    main("look")
