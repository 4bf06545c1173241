"""What the program prints to a user, kept in docs/transcripts: python -m scripts.pages.transcripts writes it again.

No test compares the files. A maintainer reads how they change: a sentence that has to be read twice is a defect.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "transcripts"
SMALL = ("model=tiny", "trainer=cpu", "trainer.max_steps=80", "threads=1")
TRANSCRIPTS = {  # file -> commands, in one folder with the text my.txt
    "train-help.txt": [("train", "--help")],
    "ablate-help.txt": [("ablate", "--help")],
    "other-help.txt": [(name, "--help") for name in ("generate", "evaluate", "export", "report", "runs", "look")],
    "first-run.txt": [
        ("train", "my.txt", "trainer=cpu", "run_dir=runs/first"),
        ("train", "my.txt", "trainer=cpu", "run_dir=runs/first"),
        ("generate", "a model of", "max_new_tokens=40"),
        ("evaluate", "my.txt"),
        ("runs",),
    ],
    "question.txt": [("ablate", "model.previous_token_init=2,0", "my.txt", *SMALL, "output_dir=answer")],
    "mistakes.txt": [
        ("train", "my.tx"),
        ("train", "my.txt", "steps=10"),
        ("train", "my.txt", "head=tyed"),
        ("train", "my.txt", "optim.lr=fast"),
        ("generate", "--temp", "0.8"),
        ("ablate", "model.dropout=0.1", "my.txt"),
    ],
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        shutil.copy(ROOT / "docs/studies/tying.md", f"{place}/my.txt")
        for name, commands in TRANSCRIPTS.items():
            text = "\n".join(transcript(place, *words) for words in commands)
            (FOLDER / name).write_text(text, encoding="utf-8")
            print(FOLDER / name)
        shutil.copy(f"{place}/answer/report.md", FOLDER / "report.md")


def transcript(place: str, command: str, *words: str) -> str:
    """Return a command with all that it prints, standard error first."""
    line = [sys.executable, "-m", "lm", command, *words]
    environment = os.environ | {"COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(line, cwd=place, env=environment, text=True, capture_output=True)
    shown = " ".join(["python -m lm", *(f'"{word}"' if " " in word else word for word in (command, *words))])
    printed = f"{ran.stderr}{ran.stdout}".replace(sys.executable, "python").rstrip()
    return f"$ {shown}\n{printed}\n"


if __name__ == "__main__":
    main()
