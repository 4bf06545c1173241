"""Answer a question: python scripts/ablate.py ablation=NAME [output_dir=DIR] [plan_only=true] [any setting of train]"""

from lm.cli.main import main

if __name__ == "__main__":
    main("ablate")
