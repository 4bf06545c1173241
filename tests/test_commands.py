"""lm-lab and its commands: what they list, what they complete, how they name themselves."""

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, some

from lm import __version__
from lm.cli import main as front
from lm.cli import program
from lm.cli.errors import CONFIGS
from lm.cli.summary import samples


def run(line: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


def lab(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "lm", *words], folder, **env)


def test_every_command_is_a_script_and_opens_as_it() -> None:
    assert set(front.COMMANDS) == {path.stem for path in (ROOT / "scripts").glob("*.py")}
    for name in front.COMMANDS:
        first = str(import_module(f"lm.cli.{name}").__doc__).splitlines()[0]
        script = (ROOT / "scripts" / f"{name}.py").read_text()
        assert script.startswith(f'"""{first.replace(f"lm-lab {name}", f"python scripts/{name}.py")}"""\n')
        assert len(script.splitlines()) == 6


@pytest.mark.parametrize("line", [[], ["--help"], ["-h"], ["help"]])
def test_the_command_alone_lists_its_commands(
    line: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lm-lab", *line])
    front.main()
    listed = re.findall(r"^  (\w+) +\S", capsys.readouterr().out, re.MULTILINE)
    assert listed == list(front.COMMANDS)


def test_a_misspelt_command_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lm-lab", "trian", "seed=1"])
    with pytest.raises(SystemExit) as left:
        front.main()
    assert left.value.code == 2
    assert capsys.readouterr().err == "error: trian: no such command; did you mean train?\n"


def test_the_version_is_the_changelogs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lm-lab", "--version"])
    front.main()
    assert capsys.readouterr().out == f"lm-lab {__version__}\n"
    newest = re.search(r"^## \[(.+?)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == __version__


# --- help


def groups_of(name: str) -> set[str]:
    """The groups that the command's own defaults list names, in configs/NAME.yaml."""
    defaults = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["defaults"]
    keys = {key.removeprefix("optional ") for one in defaults if isinstance(one, dict) for key in one}
    return {key for key in keys if not key.startswith("override")}


@pytest.mark.parametrize("name", some(front.COMMANDS, 3))
def test_help_lists_the_groups_that_the_command_takes(name: str, tmp_path: Path) -> None:
    (tmp_path / "my/head").mkdir(parents=True)
    (tmp_path / "my/head/mine.yaml").write_text("name: mine\n")
    found = run([sys.executable, ROOT / "scripts" / f"{name}.py", "--config-dir", "my", "--help"], tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    assert f": python scripts/{name}.py" in found.stdout.splitlines()[0]
    assert "lm-lab" not in found.stdout
    listed = dict(re.findall(r"^  (\w+): (\w.*)$", found.stdout.partition("Settings, each")[0], re.MULTILINE))
    assert set(listed) == groups_of(name)
    for group, choices in listed.items():
        mine = {"mine"} if group == "head" else set()
        assert set(choices.split(", ")) == {path.stem for path in (CONFIGS / group).glob("*.yaml")} | mine
    if name == "ablate":
        assert "python scripts/train.py --help lists them" in found.stdout


def test_help_names_the_command_as_it_was_started(tmp_path: Path) -> None:
    found = lab(tmp_path, "train", "--help")
    assert found.stdout.startswith("Train one run: python -m lm train ")
    assert "python -m lm train -m head=tied,untied" in found.stdout


@pytest.mark.parametrize(
    ("argv", "start"),
    [
        (["/somewhere/bin/lm-lab", "train"], ["lm-lab", "report"]),
        (["scripts/ablate.py"], ["python", "scripts/report.py"]),
        (["/site-packages/lm/__main__.py"], ["python", "-m", "lm", "report"]),
    ],
)
def test_another_command_is_named_in_the_form_that_was_used(
    argv: list[str], start: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert program.start("report") == start


def test_the_command_line_is_quoted_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["data=text", "data.path=my file.txt", 'key=["a"]']
    monkeypatch.setattr(sys, "argv", ["scripts/train.py", *words])
    monkeypatch.setattr(sys, "orig_argv", [".venv/bin/python", "-W", "error", "scripts/train.py", *words])
    assert shlex.split(program.typed()) == [".venv/bin/python", "-W", "error", "scripts/train.py", *words]
    assert "'data.path=my file.txt'" in program.typed()
    monkeypatch.setattr(sys, "argv", [".venv/bin/lm-lab", "train", *words])
    assert shlex.split(program.typed()) == [".venv/bin/lm-lab", "train", *words]


def test_a_program_on_the_path_is_named_without_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lm-lab").write_text("#!/bin/sh\n")
    (tmp_path / "lm-lab").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "lm-lab"), "train", "seed=1"])
    assert program.typed() == "lm-lab train seed=1"


# --- shell completion, which is Hydra's


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("lm-lab tr", set(front.COMMANDS)),
        ("lm-lab ", set(front.COMMANDS)),
        ("lm-lab train head=tied_", {"head=tied_naive", "head=tied_projected", "head=tied_scaled"}),
        ("lm-lab train model.n_l", {"model.n_layers="}),
        ("lm-lab ablate ablation=sm", {"ablation=smoke"}),
    ],
)
def test_the_console_command_completes(line: str, wanted: set[str], tmp_path: Path) -> None:
    found = lab(tmp_path, "-sc", "query=bash", COMP_LINE=line)
    assert (found.returncode, found.stderr) == (0, "")
    assert set(found.stdout.split()) == wanted


@pytest.mark.parametrize(
    ("name", "word", "wanted"), [("train", "optim.l", {"optim.lr="}), ("ablate", "ablation=sm", {"ablation=smoke"})]
)
def test_a_script_completes(name: str, word: str, wanted: set[str], tmp_path: Path) -> None:
    line = [sys.executable, ROOT / "scripts" / f"{name}.py", "-sc", "query=bash"]
    found = run(line, tmp_path, COMP_LINE=f"python scripts/{name}.py {word}")
    assert (found.returncode, found.stderr) == (0, "")
    assert set(found.stdout.split()) == wanted


def test_bash_installs_the_completion_of_the_console_command(tmp_path: Path) -> None:
    (tmp_path / "lm-lab").write_text(f"#!{sys.executable}\nfrom lm.cli.main import main\nmain()\n")
    (tmp_path / "lm-lab").chmod(0o755)
    asked = 'eval "$(lm-lab -sc install=bash)" && complete -p lm-lab'
    found = run(["bash", "-c", asked], tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.endswith("-F hydra_bash_completion lm-lab\n")


# --- what a run prints at its end


def test_samples_are_labelled_and_cannot_steer_the_terminal() -> None:
    found = samples([{"prompt": ">>> f(1)\n", "continuation": "1\n\x1b[2J\x07\u202e"}], own=False)
    assert found.splitlines() == [
        "Samples (greedy; prompts from the validation text)",
        "",
        "  prompt | >>> f(1)",
        "         |",
        "  model  | 1",
        r"         | \x1b[2J\x07\u202e",
    ]
