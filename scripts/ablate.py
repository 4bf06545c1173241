"""Answer a question: python scripts/ablate.py KEY=A,B [TEXT] | FILE.yaml | ablation=NAME | confirm=DIR [any setting]"""

from lm.cli.main import main

if __name__ == "__main__":
    main("ablate")
