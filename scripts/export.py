"""Write a Hugging Face folder or a GGUF file: python scripts/export.py run_dir=RUN output_dir=DIR [format=gguf]"""

from lm.cli.main import main

if __name__ == "__main__":
    main("export")
