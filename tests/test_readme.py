"""What the README and the pages in docs/ say can be typed is typed here, and what they link to is there."""

import csv
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY_RUN, Script

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*/**/*.md"))]
QUICK = ["data=text", "tokenizer=byte", "tokenizer.vocab_size=null", "trainer.max_steps=4", "threads=1"]
SMALL = [word for word in TINY_RUN if word.split("=")[0] not in ("data", "trainer")]

STARTS = ("python scripts/", "python -m lm ", "lm-lab ")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """The lines of bash blocks that start one of our commands, without the comment behind them."""
    lines = "".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    return [
        re.sub(r"\s+#.*", "", line)
        for line in lines
        if line.startswith(("python scripts/", "python -m lm ", "lm-lab "))
    ]


COMMANDS = {command: page.relative_to(ROOT).as_posix() for page in PAGES for command in commands(page.read_text())}


def test_the_readme_has_at_most_two_hundred_lines() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_the_curves_of_the_figure_end_at_the_table(head: str) -> None:
    with open(ROOT / "docs/figures/loss.csv", newline="") as file:
        *estimates, last = [row for row in csv.DictReader(file) if row["head"] == head]
    assert f"| `head={head}` | {float(last['val/loss']):.4f} |" in README
    assert {int(row["val/tokens"]) for row in estimates} == {16 * 8 * 128}
    assert int(last["val/tokens"]) > 16 * 8 * 128


def test_the_two_commands_are_what_ci_runs() -> None:
    lines = [line for line in "".join(blocks(README, "bash")).splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2
    assert "pip install" in lines[0]
    assert "scripts/train.py" in lines[0]
    assert lines[1].endswith(".venv/bin/pytest")
    found = subprocess.run(["bash", ROOT / ".ci/run", "--list"], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == lines


def test_every_script_is_in_the_readme() -> None:
    named = set(re.findall(r"scripts/(\w+)\.py", README)) | set(re.findall(r"`(\w+)`", README))
    assert {path.stem for path in (ROOT / "scripts").glob("*.py")} <= named


def test_every_room_is_in_the_project_layout() -> None:
    (tree,) = (block for block in re.findall(r"^```\w*\n(.*?)^```", README, re.DOTALL | re.MULTILINE) if "lm/" in block)
    named = set(re.findall(r"^(?:lm/| +)(\w+)/  ", tree, re.MULTILINE))
    rooms = {path.parent.name for path in (ROOT / "lm").glob("*/__init__.py")}
    assert named & rooms == rooms
    there = re.findall(r"(?:^|  )([\w./]+/)(?=\s|$)", tree, re.MULTILINE)
    assert [name for name in there if not (ROOT / name).is_dir() and not (ROOT / "lm" / name).is_dir()] == []


def test_every_file_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"`((?:lm|configs|tests|scripts|docs)/[\w./]+)`", README))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    links = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|href)="([^"]+)"', text)]
    local = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if link and not (page.parent / link).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize(("command", "page"), COMMANDS.items())
def test_the_command_runs(command: str, page: str, script: Script, corpus: Path, tmp_path: Path) -> None:
    name, words = read(command)
    if name != "train" or any("RUN" in word for word in words):
        small = script("train", "data=text", "trainer=cpu", *SMALL, f"data.path={corpus}", "run_dir=run")
        assert small.returncode == 0, small.stderr
    if name == "runs":
        shutil.copytree(tmp_path / "run", tmp_path / "runs/run")
    if name == "report" and "output_dir=DIR" in words:
        small = script("ablate", "ablation=smoke", "output_dir=out", *QUICK, f"data.path={corpus}")
        assert small.returncode == 0, small.stderr
    if words == ["run_dir=RUN"]:
        words = ["run_dir=run"]
    else:
        less = {"train": SMALL, "ablate": [*QUICK, f"data.path={corpus}"], "benchmark": ["only=[limits]", "seconds=0"]}
        places = {"FILE": str(corpus), "RUN": "run", "DIR": "out"}
        words = [re.sub(r"\b(FILE|RUN|DIR)\d?\b", lambda found: places[found[1]], word) for word in words]
        words += less.get(name, [])
    answer = script(name, *words)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout


def read(command: str) -> tuple[str, list[str]]:
    """The name and the words of a command, whichever way it is started."""
    words = shlex.split(command)
    if words[0] == "lm-lab":
        return words[1], words[2:]
    return (words[3], words[4:]) if words[1] == "-m" else (Path(words[1]).stem, words[2:])


@pytest.mark.slow
def test_the_notebook_example_runs(script: Script, corpus: Path, tmp_path: Path) -> None:
    small = script("train", "data=text", "trainer=cpu", *SMALL, f"data.path={corpus}", "run_dir=run")
    assert small.returncode == 0, small.stderr
    (code,) = blocks(README, "python")
    names: dict[str, Any] = {}
    exec(code.replace("runs/...", str(tmp_path / "run")), names)
    assert names["logits"].shape == (*names["tokens"].shape, 257)


@pytest.mark.slow
def test_the_example_of_an_ablation_can_be_planned(script: Script, corpus: Path, tmp_path: Path) -> None:
    (example,) = blocks(README, "yaml")
    place = re.search(r"^# mine/(ablation/(\w+)\.yaml)$", example, re.MULTILINE)
    assert place
    (tmp_path / "my" / place[1]).parent.mkdir(parents=True)
    (tmp_path / "my" / place[1]).write_text(example)
    corpus.rename(tmp_path / "my.txt")
    words = ["--config-dir", "my", f"ablation={place[2]}", "plan_only=true", "tokenizer=byte", *SMALL[-8:]]
    answer = script("ablate", *words)
    assert answer.returncode == 0, answer.stderr
    assert "Does dropout help on my text?" in answer.stdout
