"""What the README and the pages in docs/ say can be typed is typed here, and what they link to is there."""

import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY_RUN, Script

from lm.results import contrasts

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*/**/*.md"))]
QUICK = ["data=text", "tokenizer=byte", "tokenizer.vocab_size=null", "trainer.max_steps=4", "threads=1"]
SMALL = [word for word in TINY_RUN if word.split("=")[0] not in ("data", "trainer")]


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


def test_the_two_commands_are_what_ci_runs() -> None:
    lines = [line for line in "".join(blocks(README, "bash")).splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2
    assert "pip install" in lines[0]
    assert "scripts/train.py" in lines[0]
    assert lines[1].endswith(".venv/bin/pytest")
    listed = subprocess.run(["bash", ROOT / ".ci/run", "--list"], capture_output=True, text=True, check=True)
    assert listed.stdout.splitlines() == lines


def test_the_readme_names_every_package_and_script_and_only_what_exists() -> None:
    assert len(README.splitlines()) <= 150
    packages = {path.parent.name for path in (ROOT / "lm").glob("*/__init__.py")}
    assert packages == set(re.findall(r"^lm/(\w+)/  ", README, re.MULTILINE))
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert scripts <= set(re.findall(r"(?:scripts/|`)(\w+)\.py", README))
    paths = set(re.findall(r"`((?:lm|configs|tests|scripts|docs)/[\w./]+)`", README))
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("folder", ["main", "longer_tuned"])
def test_the_readme_states_the_intervals_of_the_study_of_tying(folder: str) -> None:
    (row,) = (
        contrasts(ROOT / "docs/studies/tying" / folder).query("arm == 'untied' and budget == 'tokens'").itertuples()
    )
    interval = f"{row.mean_difference:+.3f} nats (95 % CI {row.ci_low:.3f} to {row.ci_high:.3f})"
    assert interval in " ".join(README.split())


@cache
def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    links = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|href)="([^"]+)"', text)]
    for link in (link for link in links if not re.match(r"[a-z]+:", link)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


@pytest.mark.parametrize(
    ("command", "page"),
    [
        pytest.param(command, page, marks=pytest.mark.slow if page == "README.md" else pytest.mark.nightly)
        for command, page in COMMANDS.items()
    ],
)
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
        words = [re.sub(r"\b(FILE|RUN|DIR)\d?\b", lambda match: places[match[1]], word) for word in words]
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
    place = re.search(r"`mine/(ablation/(\w+)\.yaml)`", README)
    assert place
    (tmp_path / "my" / place[1]).parent.mkdir(parents=True)
    (tmp_path / "my" / place[1]).write_text(example)
    corpus.rename(tmp_path / "my.txt")
    words = ["--config-dir", "my", f"ablation={place[2]}", "plan_only=true", "tokenizer=byte", *SMALL[-8:]]
    answer = script("ablate", *words)
    assert answer.returncode == 0, answer.stderr
    assert "Does dropout help on my text?" in answer.stdout
