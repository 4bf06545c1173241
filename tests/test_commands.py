"""lm-lab and its commands: what they list, what --help says, what they complete, how they name themselves."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from conftest import ROOT, Outcome, some

from lm import __version__
from lm.cli import main as front
from lm.cli.help import EXAMPLES, GROUPS, USUAL
from lm.cli.mistakes import CONFIGS, kinds_of

Command = Callable[..., Outcome]


def lab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> Outcome:
    monkeypatch.setattr(sys, "argv", ["lm-lab", *args])
    with pytest.raises(SystemExit) as left:
        front.main()
    return (int(left.value.code or 0), *capsys.readouterr())


def test_every_command_is_a_script_and_opens_as_it() -> None:
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert {*front.COMMANDS} == scripts - {"benchmark"}  # which is no part of the package
    for name in front.COMMANDS:
        first = str(import_module(f"lm.cli.{name}").__doc__).splitlines()[0]
        script = (ROOT / "scripts" / f"{name}.py").read_text()
        assert script.startswith(f'"""{first.replace(f"lm-lab {name}", f"python scripts/{name}.py")}"""\n')
        assert len(script.splitlines()) == 6


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["help"]])
def test_the_command_alone_lists_its_commands(
    args: list[str], command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = lab(monkeypatch, capsys, *args)
    assert code == 0
    assert re.findall(r"^  (\w+) +\S", out, re.MULTILINE) == list(front.COMMANDS)


def test_a_misspelt_command_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = lab(monkeypatch, capsys, "trian", "seed=1")
    assert outcome == (2, "", "error: trian: no such command; did you mean train?\n")


def test_the_version_is_the_changelogs(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lab(monkeypatch, capsys, "--version") == (0, f"lm-lab {__version__}\n", "")
    assert command("train", "--version") == (0, f"lm-lab {__version__}\n", "")
    newest = re.search(r"^## \[(.+?)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == __version__


@pytest.mark.parametrize("name", some(front.COMMANDS, 3))
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
    assert front.start_of("report") == start


# --- shell completion, which is Hydra's for train and ablate


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("lm-lab tr", set(front.COMMANDS)),
        ("lm-lab train head=tied_", {"head=tied_naive", "head=tied_projected", "head=tied_scaled"}),
        ("lm-lab train model.n_l", {"model.n_layers="}),
        ("lm-lab ablate ablation=sm", {"ablation=smoke"}),
        ("lm-lab export ", {"run_dir=", "output_dir=", "format=", "dtype=", "trust="}),
    ],
)
def test_the_console_command_completes(
    line: str,
    wanted: set[str],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    code, out, error = lab(monkeypatch, capsys, "-sc", "query=bash")
    assert (code, set(out.split()), error) == (0, wanted, "")


@pytest.mark.slow
def test_bash_installs_the_completion_of_the_console_command(tmp_path: Path) -> None:
    (tmp_path / "lm-lab").write_text(f"#!{sys.executable}\nfrom lm.cli.main import main\nmain()\n")
    (tmp_path / "lm-lab").chmod(0o755)
    asked = 'eval "$(lm-lab -sc install=bash)" && complete -p lm-lab'
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", asked], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("-F hydra_bash_completion lm-lab\n")
