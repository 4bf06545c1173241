"""Write a Hugging Face folder: python scripts/export.py run_dir=RUN output_dir=DIR"""

from lm.cli.export import main

if __name__ == "__main__":
    main()
