"""The commands as a user types them, from the checkout and from a wheel: output, exit codes, and what ends them."""

import fcntl
import io
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, TEXT, TINY_RUN, Outcome, Script
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lm
from lm import generate, load_model
from lm.cli.main import main
from tests.helpers.runs import PROCESSES, unblock_signals, wait_for

Command = Callable[..., Outcome]
PROMPT = """def f(x, y):  # {"a": '1', ${b}}, c=[1,2] \\ """
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
slow = pytest.mark.slow


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, but for a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my file.txt").write_text(TEXT)
    return tmp_path


def start(name: str, *args: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(ROOT / f"scripts/{name}.py"), *args], text=True, **options)


def on_terminal(words: list[str], folder: Path, columns: int = 80, ctrl_c_after: str | None = None) -> list[str]:
    """What stands on each line of a terminal of its own in the end, of all that was written there.

    Ctrl-C is typed once a word has appeared.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams = {"stdin": slave, "stdout": slave, "stderr": slave, "env": env, "cwd": folder}
    process = subprocess.Popen(words, start_new_session=True, preexec_fn=take_terminal, **streams)  # type: ignore
    os.close(slave)
    written = b""
    while True:
        try:
            block = os.read(master, 1 << 16)
        except OSError:  # the terminal has no user any more
            break
        written += block
        if ctrl_c_after and ctrl_c_after.encode() in written:
            os.write(master, b"\x03")
            ctrl_c_after = None
    process.wait()
    os.close(master)
    return [_in_the_end(line) for line in written.decode().replace("\r\n", "\n").split("\n")]


def _in_the_end(line: str) -> str:
    """A line after each carriage return in it: what is written later covers what stood there."""
    shown = ""
    for part in line.split("\r"):
        if part.startswith("\x1b[K"):  # erases the line
            part, shown = part.removeprefix("\x1b[K"), ""
        shown = part + shown[len(part) :]
    return shown.rstrip()


def train_unread(words: list[str], ignored: tuple[int, ...]) -> None:
    """The command in a process that has imported it already; nobody reads what it writes."""
    unblock_signals()
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))  # those of pytest are files
    sys.argv = [str(ROOT / "scripts/train.py"), *words]
    main("train")


def test_train_then_generate_verbatim(command: Command, cwd: Path) -> None:
    words = [*TINY_RUN, "data.path=my file.txt", "run_dir=a run", "trainer.max_steps=2"]
    assert command("train", *words)[0] == 0
    code, out, errors = command("generate", "run_dir=a run", f"prompt={PROMPT}", "max_new_tokens=12", "threads=1")
    net, tokenizer = load_model("a run")
    assert (code, out, errors) == (0, PROMPT + generate(net, tokenizer, PROMPT, 12) + "\n", "")


@slow
def test_generate_in_every_way(command: Command, finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished_run.parent)
    name = f"run_dir={finished_run.name}"

    def generated(*words: str, content: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
        code, out, _ = command("generate", name, *words, "threads=1")
        assert code == 0
        return out

    assert generated("prompt_file=-", "max_new_tokens=3", content="def ").startswith("def ")
    Path("marked.txt").write_bytes(b"\xef\xbb\xbfdef ")  # with the byte-order mark of an editor
    assert generated("prompt_file=marked.txt", "max_new_tokens=3") == generated("prompt=def ", "max_new_tokens=3")
    first, same, other = (generated("prompt=d", "temperature=1.0", f"seed={seed}") for seed in (1, 1, 2))
    assert first == same != other
    typed = generated("interactive=true", "max_new_tokens=3", content="def \nclass \n")
    assert (typed[:4], "\nclass " in typed) == ("def ", True)
    drawn = generated("interactive=true", "temperature=1.0", "max_new_tokens=20", content="d\nd\n")
    first = generated("prompt=d", "temperature=1.0", "max_new_tokens=20")
    assert drawn.startswith(first)
    assert drawn != first * 2, "each prompt is drawn anew"
    several = generated("prompt=d", "temperature=1.0", "n_samples=2", "top_k=20", "min_p=0.01", "seed=1")
    assert re.match(r"=== sample 1 of 2\nd(.|\n)*\n=== sample 2 of 2\nd", several)
    _, out, errors = command("generate", "run_dir=[a run,a run/model]", "prompt=d", "max_new_tokens=3", "top=2")
    assert [line for line in out.splitlines() if line.startswith("===")] == ["=== a run", "=== a run/model"]
    assert (errors.count("top 2"), errors.count("%")) == (2, 2 * 2 * 3)


def test_the_first_line_comes_before_what_takes_seconds(cwd: Path) -> None:
    """In a second of an idle core; the limit is of the time that the process has had, without pytest --cov."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE_")}
    for words, line in (([], "reading my file.txt (9 kB): experiment="), (["experiment=none"], "reading my file.txt")):
        with start("train", "my file.txt", *words, cwd=cwd, env=env, stderr=subprocess.PIPE) as process:
            assert process.stderr
            assert process.stderr.readline().startswith(line)
            assert sum(psutil.Process(process.pid).cpu_times()[:2]) < 2
            process.kill()


SHORT = [*TINY_RUN, "tokenizer=bpe", "tokenizer.vocab_size=270", "prompts=null", "data.path=my file.txt"]


@slow
def test_a_run_ends_with_a_text_to_read_and_lines_to_paste(cwd: Path, command: Command) -> None:
    line = [sys.executable, str(ROOT / "scripts/train.py"), *SHORT, "experiment=none", "trainer.max_steps=3"]
    shown = on_terminal(line, cwd)
    assert max(len(row) for row in shown if "scripts/" not in row) <= 80
    assert not [row for row in shown if "Pre-processing" in row or "it/s" in row or "tok/s" in row]
    end = shown[shown.index(next(row for row in shown if row.startswith("validation loss"))) :]
    drawn, greedy = end.index("Drawn at temperature=0.8:"), end.index("Greedy:")
    assert 200 < len("".join(end[drawn + 2 : greedy])) < 500
    assert greedy - drawn > 5, "with the line breaks of the text"
    pasted = [shlex.split(row)[1:] for row in end if re.match(r"  \S*python\S* ", row)]
    assert [Path(script).stem for script, *_ in pasted] == ["generate", "look", "ablate"]
    assert command("generate", *pasted[0][1:])[1].startswith(pasted[0][1].removeprefix("prompt="))
    assert pasted[2][1:] == ["head=tied,untied", "my file.txt"]


@slow
@pytest.mark.nightly
def test_no_message_stands_behind_a_bar(cwd: Path) -> None:
    words = [*SHORT, "trainer.max_steps=100000", "run_dir=run"]
    shown = on_terminal([sys.executable, str(ROOT / "scripts/train.py"), *words], cwd, ctrl_c_after="training:")
    assert [row for row in shown if row.startswith("stopping after this step; ")]
    assert [row for row in shown if row.startswith("stopped by Ctrl-C after step ")]


@slow
@pytest.mark.nightly
def test_a_reader_that_leaves_ends_a_command_without_a_word(finished_run: Path) -> None:
    options: dict[str, Any] = {"cwd": finished_run.parent, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start("generate", "run_dir=a run", "prompt=x", "max_new_tokens=1000000", **options) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.read(1) == "x"
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (1, "")
    with open("/dev/full", "w") as full:
        shown = start("train", "run_dir=a run", cwd=finished_run.parent, stdout=full, stderr=subprocess.PIPE)
        assert shown.communicate(timeout=60)[1].splitlines()[-1].startswith("error: No space left on device; free")
    assert shown.returncode == 1


@slow
def test_a_sweep_runs_each_job_and_compares_them(command: Command, cwd: Path) -> None:
    words = [*TINY_RUN, "data.path=my file.txt,absent.txt", "trainer.max_steps=5", "head=tied,untied", "seed=0,1"]
    code, out, errors = command("train", "-m", *words)
    assert (code, errors.count("error: data.path=absent.txt: no such file")) == (2, 4)
    results = [json.loads(path.read_text()) for path in cwd.glob("runs/*/result.json")]
    pairs = sorted((result["head"], result["seed"]) for result in results)
    assert pairs == [("tied", 0), ("tied", 1), ("untied", 0), ("untied", 1)]
    head, *last = [re.split("  +", line) for line in out.strip().splitlines()[-3:]]
    assert (head[:2], head[-1]) == (["head", "seeds"], "seconds"), "others: tests/test_published.py"
    assert [line[:2] for line in last] == [["tied", "2"], ["untied", "2"]]


@slow
@pytest.mark.nightly
def test_a_job_in_a_process_of_its_own_ends_the_sweep_with_its_code(script: Script, cwd: Path) -> None:
    """As under Hydra's launchers for joblib and submitit: what a job notes in its own process does not come back."""
    plugins = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests/plugins"), os.environ.get("PYTHONPATH", "")])}
    line = ("-m", "hydra/launcher=processes", *TINY_RUN, "data.path=absent.txt,my file.txt", "seed=1")
    answer = script("train", *line, env=plugins)
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[-1].startswith("error: a job of the sweep failed: data.path=absent.txt")
    assert "Traceback" not in answer.stderr
    assert "20 steps" in answer.stderr  # messages come from the other process too
    assert len(list(cwd.glob("runs/*/result.json"))) == 1


# --- what ends a command


@slow
@pytest.mark.nightly
def test_an_interrupted_run_says_how_to_resume_it(command: Command, cwd: Path) -> None:
    words = [*TINY_RUN, "data.path=my file.txt", "run_dir=run", "trainer.max_steps=150"]
    verbs = ["checkpoint.resume=false"]  # which is not asked for again
    process = start("train", *verbs, *words, cwd=cwd, stderr=subprocess.PIPE)
    wait_for(lambda: list(cwd.glob("run/checkpoints/step-*")), 300)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in errors
    message, _, line = errors.splitlines()[-1].partition("; resume with: ")
    assert re.fullmatch(r"stopped by Ctrl-C after step \d+", message)
    assert shlex.split(line) == [sys.executable, str(ROOT / "scripts/train.py"), *words]
    assert "is unfinished" in command("generate", "run_dir=run", "prompt=x", "max_new_tokens=1")[2]
    code, _, errors = command("train", *words)
    assert (code, "resuming from step " in errors) == (0, True)


@slow
@pytest.mark.nightly
def test_a_terminal_that_closes_stops_a_run_after_a_checkpoint_unless_it_is_ignored(cwd: Path) -> None:
    """As nohup lets a command ignore it."""
    words = [*TINY_RUN, "data.path=my file.txt", "trainer.max_steps=100000", "run_dir=run"]
    for ignored, code in ((), 128 + signal.SIGHUP), ((signal.SIGHUP,), 128 + signal.SIGTERM):
        newest = max(cwd.glob("run/checkpoints/*"), default=None)
        process = PROCESSES.Process(target=train_unread, args=(words, ignored))
        process.start()
        wait_for(lambda newest=newest: max(cwd.glob("run/checkpoints/*"), default=None) != newest, 300)
        os.kill(process.pid, signal.SIGHUP)
        if ignored:
            time.sleep(0.5)
            process.terminate()
        process.join(300)
        assert process.exitcode == code


@pytest.mark.nightly
def test_a_killed_process_of_several_is_one_line_that_says_how_to_resume(cwd: Path) -> None:
    words = [*TINY_RUN, "data.path=my file.txt", "trainer.devices=2", "trainer.max_steps=100000", "run_dir=run"]
    process = start("train", *words, "validation.every=0", cwd=cwd, stderr=subprocess.PIPE)
    wait_for(lambda: list(cwd.glob("run/checkpoints/step-*")))
    (other,) = psutil.Process(process.pid).children()
    other.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert re.search(r"^error: another process of this run has ended \(.*\); resume with: .*train.py", errors, re.M)


@pytest.mark.nightly
def test_a_compiler_that_is_not_there_is_one_line(script: Script, cwd: Path) -> None:
    own = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(cwd / "cache")}
    words = [*TINY_RUN, "data.path=my file.txt", "trainer.max_steps=1", "compile=true", "run_dir=run"]
    answer = script("train", *words, env=own)
    assert (answer.returncode, "Traceback" in answer.stderr) == (2, False)
    assert re.search(r"^error: compile=true: .*no-such-compiler", answer.stderr, re.MULTILINE)


# --- the wheel does what the checkout does, in a folder where the checkout is not


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", *build], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@slow
def test_the_wheel_holds_the_configurations_the_types_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        info = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(info).decode())
    files = (path for suffix in ("yaml", "py") for path in (ROOT / "configs").rglob(f"*.{suffix}"))
    configs = {path.relative_to(ROOT).as_posix() for path in files}
    assert {f"lm/{name}" for name in configs} | {"lm/py.typed"} <= names
    assert {name for name in names if name.endswith("/licenses/LICENSE")}
    assert (metadata["Name"], metadata["Version"]) == (PROJECT["name"], lm.__version__)
    assert metadata["License-Expression"] == "MIT"
    assert not {name for name in names if name.startswith(("tests/", "scripts/", "docs/"))}


def test_the_tested_versions_are_in_the_ranges_of_the_project() -> None:
    tested = dict(line.split("==") for line in (ROOT / ".ci/constraints.txt").read_text().splitlines())
    tested = {canonicalize_name(name): version for name, version in tested.items()}
    for requirement in map(Requirement, PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]):
        assert tested[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@slow
def test_the_installed_command_finds_its_configurations_outside_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = ["pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True, capture_output=True)
    env = {**os.environ, "PYTHONPATH": str(site), "PATH": f"{site / 'bin'}:{os.environ['PATH']}"}
    options: dict[str, Any] = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "check": True}
    for words, shown in (
        ([sys.executable, "-c", "import lm; print(lm.__file__)"], f"{site}/lm/__init__.py\n"),
        (["lm-lab", "train", "--help"], "lm-lab train [TEXT] [group=choice]"),
        (["lm-lab", "train", "head=untied", "--cfg", "job"], "name: untied"),
    ):
        assert shown in subprocess.run(words, **options).stdout
