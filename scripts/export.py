"""Write a Hugging Face folder, a GGUF file or a page: python scripts/export.py run_dir=RUN output_dir=DIR"""

from lm.cli.main import main

if __name__ == "__main__":
    main("export")
