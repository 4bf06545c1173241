"""Write the report of an ablation, also while it is running: python scripts/report.py output_dir=DIR"""

from lm.cli.main import main

if __name__ == "__main__":
    main("report")
