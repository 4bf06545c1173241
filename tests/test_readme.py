"""What the README says can be typed is typed here."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY_RUN, Script

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.partition("#")[0].strip()
    for language, block in BLOCKS
    if language == "bash"
    for line in block.splitlines()
    if line.startswith("python scripts/")
]
QUICK = ["data=text", "tokenizer=byte", "tokenizer.vocab_size=null", "trainer.max_steps=4", "threads=1"]
SMALL = [word for word in TINY_RUN if word.split("=")[0] not in ("data", "trainer")]


def test_the_two_commands_are_what_ci_runs() -> None:
    lines = [line for _, block in BLOCKS for line in block.splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2
    assert "'^python3 -m venv' README.md" in (ROOT / ".ci/run").read_text()


def test_every_script_is_in_the_readme() -> None:
    named = {command.split()[1].removeprefix("scripts/") for command in COMMANDS}
    assert named == {path.name for path in (ROOT / "scripts").glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs(command: str, script: Script, corpus: Path, tmp_path: Path) -> None:
    _, path, *words = shlex.split(command)
    name = Path(path).stem
    if name != "train":
        small = script("train", "data=text", "trainer=cpu", *SMALL, f"data.path={corpus}", "run_dir=run")
        assert small.returncode == 0, small.stderr
    if name == "report":
        small = script("ablate", "ablation=smoke", "output_dir=out", *QUICK, f"data.path={corpus}")
        assert small.returncode == 0, small.stderr
    places = {"FILE": str(corpus), "RUN": "run", "DIR": "out"}
    words = [re.sub(r"\b(FILE|RUN|DIR)\b", lambda found: places[found[0]], word) for word in words]
    less = {"train": SMALL, "ablate": [*QUICK, f"data.path={corpus}"], "benchmark": ["only=[limits]", "seconds=0"]}
    answer = script(name, *words, *less.get(name, ()))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout


@pytest.mark.slow
def test_the_notebook_example_runs(script: Script, corpus: Path, tmp_path: Path) -> None:
    small = script("train", "data=text", "trainer=cpu", *SMALL, f"data.path={corpus}", "run_dir=run")
    assert small.returncode == 0, small.stderr
    (code,) = (block for language, block in BLOCKS if language == "python")
    names = {"tokens": torch.zeros(1, 4, dtype=torch.long)}
    exec(code.replace("runs/...", str(tmp_path / "run")), names)
    assert names["logits"].shape == (1, 4, 257)


def test_the_files_that_the_tree_names_exist() -> None:
    (tree,) = (block for block in README.split("```") if "  cli.py errors.py  " in block)
    named = set(re.findall(r"[a-z_]+\.py", tree))
    there = {path.name for path in (ROOT / "lm").rglob("*.py")} - {"__init__.py"}
    assert named == there
