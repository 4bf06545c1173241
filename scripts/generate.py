"""Continue a prompt: python scripts/generate.py run_dir=RUN "prompt=def f(x, y):" [max_new_tokens=N] [temperature=T]"""

from lm.cli.main import main

if __name__ == "__main__":
    main("generate")
