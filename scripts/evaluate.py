"""Score a model: python scripts/evaluate.py run_dir=RUN [data=text data.path=FILE]"""

from lm.cli.main import main

if __name__ == "__main__":
    main("evaluate")
