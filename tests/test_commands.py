"""lm-lab and its commands: what they list, what --help says, what they complete, how they name themselves."""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from conftest import ROOT, Outcome

from lm import __version__
from lm.cli import main as front
from lm.cli.help import EXAMPLES, GROUPS, USUAL
from lm.cli.mistakes import CONFIGS, kinds_of

Command = Callable[..., Outcome]


@pytest.fixture
def lab(command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run lm-lab as `command` runs a script."""

    def run(*args: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["lm-lab", *args])
        with pytest.raises(SystemExit) as left:
            front.main()
        return (int(left.value.code or 0), *capsys.readouterr())

    return run


def test_every_command_is_a_script_and_opens_as_it() -> None:
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert {*front.COMMANDS} == scripts - {"benchmark"}  # which is no part of the package
    for name in front.COMMANDS:
        first = str(import_module(f"lm.cli.{name}").__doc__).splitlines()[0]
        script = (ROOT / "scripts" / f"{name}.py").read_text()
        assert script.startswith(f'"""{first.replace(f"lm-lab {name}", f"python scripts/{name}.py")}"""\n')
        assert len(script.splitlines()) == 6


def test_the_command_alone_lists_its_commands(lab: Command) -> None:
    for args in ([], ["--help"], ["-h"], ["help"]):
        code, out, _ = lab(*args)
        assert code == 0
        assert re.findall(r"^  (\w+) +\S", out, re.MULTILINE) == list(front.COMMANDS)
    assert lab("trian", "seed=1") == (2, "", "error: trian: no such command; did you mean train?\n")


def test_the_version_is_the_changelogs(command: Command, lab: Command) -> None:
    assert lab("--version") == command("train", "--version") == (0, f"lm-lab {__version__}\n", "")
    newest = re.search(r"^## \[(.+?)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == __version__


@pytest.mark.parametrize("name", front.COMMANDS)
def test_help_has_a_line_for_each_setting_and_each_group(
    name: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my/head").mkdir(parents=True)
    (tmp_path / "my/head/mine.yaml").touch()
    code, out, error = command(name, "--config-dir", "my", "--help")
    assert (code, error) == (0, "")
    assert f": python scripts/{name}.py" in out.splitlines()[0]
    assert "lm-lab" not in out
    assert (f"Example: python scripts/{name}.py" in out) == (name in EXAMPLES)
    listed = dict(re.findall(r"^  (\w+): (\w.*)$", out.partition("Settings, each")[0], re.MULTILINE))
    assert tuple(listed) == GROUPS.get(name, ())
    for group, choices in listed.items():
        mine = {"mine"} if group == "head" else set()
        assert set(choices.split(", ")) == {path.stem for path in (CONFIGS / group).glob("*.yaml")} | mine
    kinds = kinds_of(import_module(f"lm.cli.{name}").SCHEMA)
    leaves = {key for key in kinds if not any(other.startswith(f"{key}.") for other in kinds)}
    keys = re.findall(r"^  ([\w.]+)=", out, re.MULTILINE)
    assert sorted(keys) == sorted(leaves)
    if name == "train":
        assert tuple(keys[:10]) == USUAL
        assert re.search(r"^  checkpoint.every=100 +optimizer steps$", out, re.MULTILINE)
        assert "--cfg job" in out


def test_the_console_command_completes(lab: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for line, expected in {
        "lm-lab tr": set(front.COMMANDS),
        "lm-lab train head=tied_": {"head=tied_naive", "head=tied_projected", "head=tied_scaled"},
        "lm-lab ablate ablation=sm": {"ablation=smoke"},
        "lm-lab export ": {"run_dir=", "output_dir=", "format=", "dtype=", "trust="},
    }.items():
        monkeypatch.setenv("COMP_LINE", line)
        code, out, error = lab("-sc", "query=bash")
        assert (code, set(out.split()), error) == (0, expected, "")
