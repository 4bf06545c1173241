"""Standard output and error whose reader has left, or that were closed or full from the start."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY_RUN, Script

LENIENT, STRICT = (f"import sys; from lm.system import streams; streams.protect({one}); " for one in (False, True))
WRITE = "[print(i, file=sys.{}, flush=True) for i in range(9)]; open('done', 'w')"
LOST = "error: standard output: closed before anything was written to it\n"


@pytest.fixture
def gone() -> Iterator[int]:
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def python(code: str, folder: Path, **streams: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, text=True, timeout=60, check=False, **streams)


@pytest.mark.parametrize(("unbuffered", "seen"), [("", "stderr\n"), ("1", "stdout\nstderr\n")])
def test_a_line_is_seen_when_it_is_written(unbuffered: str, seen: str, tmp_path: Path) -> None:
    code = f"{LENIENT} import os; [print(name, file=getattr(sys, name)) for name in ('stdout', 'stderr')]; os._exit(0)"
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    assert python(code, tmp_path, env=env, **both).stdout == seen


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_what_nobody_reads_ends_nothing(name: str, gone: int, tmp_path: Path) -> None:
    assert python("import sys; " + WRITE.format(name), tmp_path, **{name: gone}).returncode != 0
    assert not (tmp_path / "done").exists(), "without protection"
    assert python(LENIENT + WRITE.format(name), tmp_path, **{name: gone}).returncode == 0
    assert (tmp_path / "done").exists()


def test_child_processes_write_nothing_to_the_broken_pipe(gone: int, tmp_path: Path) -> None:
    child = "import os, subprocess; os._exit(subprocess.call(['echo', 'x']))"
    assert python(child, tmp_path, stdout=gone, stderr=subprocess.DEVNULL).returncode != 0
    assert python(f"{LENIENT}print('x', flush=True); {child}", tmp_path, stdout=gone).returncode == 0


def test_a_result_that_nobody_reads_is_an_error_once(gone: int, tmp_path: Path) -> None:
    code = STRICT + "\ntry: print(1, flush=True)\nexcept streams.ReaderLeft as e: print(2); sys.exit(7 + e.delivered)"
    assert python(code, tmp_path, stdout=gone).returncode == 7


@pytest.mark.parametrize(("name", "number"), [("stdout", 1), ("stderr", 2)])
def test_the_number_of_a_closed_stream_goes_to_no_file(name: str, number: int, tmp_path: Path) -> None:
    for protect, taken in (("import sys; ", True), (LENIENT, False)):
        code = f"{protect}file = open('kept', 'w'); print('x', file=sys.{name}); sys.exit(file.fileno() == {number})"
        line = shlex.join([sys.executable, "-c", code]) + f" {number}>&-"
        assert subprocess.run(line, shell=True, cwd=tmp_path, timeout=60, check=False).returncode == taken


def test_a_full_disk_is_an_error_of_standard_output_only(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        assert python(LENIENT + WRITE.format("stderr"), tmp_path, stderr=full).returncode == 0
        found = python(LENIENT + WRITE.format("stdout"), tmp_path, stdout=full, stderr=subprocess.PIPE)
    assert "No space left on device: 'standard output'" in found.stderr


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_the_front_page_needs_no_reader(words: list[str], gone: int, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "lm", *words]
    found = subprocess.run(line, cwd=tmp_path, stdout=gone, stderr=subprocess.PIPE, check=False)
    assert (found.returncode, found.stderr) == (0, b"")


# --- whole commands


def run(name: str, *words: str, cwd: Path, **streams: Any) -> tuple[int, str]:
    line = [sys.executable, str(ROOT / f"scripts/{name}.py"), *words]
    found = subprocess.run(line, cwd=cwd, timeout=300, check=False, **{"stderr": subprocess.PIPE} | streams)
    return found.returncode, (found.stderr or b"").decode()


@pytest.mark.slow
def test_training_goes_on_when_the_reader_of_its_messages_leaves(script: Script, corpus: Path, tmp_path: Path) -> None:
    line = [sys.executable, str(ROOT / "scripts/train.py"), *TINY_RUN, f"data.path={corpus}", "run_dir=run"]
    process = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 0
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 20


@pytest.mark.slow
def test_an_ablation_goes_on_without_a_reader(corpus: Path, tmp_path: Path, gone: int) -> None:
    words = ["ablation=smoke", *TINY_RUN, "tokenizer.vocab_size=null", f"data.path={corpus}", "ablation.seeds=[0,1]"]
    assert run("ablate", *words, "output_dir=out", cwd=tmp_path, stdout=gone, stderr=gone)[0] == 0
    assert len(list(tmp_path.glob("out/cells/*/result.json"))) == 4
    assert (tmp_path / "out/report.md").exists()


@pytest.mark.slow
def test_scores_that_nobody_reads_are_an_error(script: Script, corpus: Path, tmp_path: Path, gone: int) -> None:
    assert script("train", *TINY_RUN, f"data.path={corpus}", "run_dir=run").returncode == 0
    score = ("evaluate", "run_dir=run", "threads=1")
    code, said = run(*score, cwd=tmp_path, stdout=gone)
    assert code == 1
    assert said.endswith(LOST)
    silent = run(*score, cwd=tmp_path, stdout=subprocess.PIPE, stderr=gone)
    assert silent == (0, "")
    line = [sys.executable, str(ROOT / "scripts/generate.py"), "run_dir=run", "prompt=def f"]
    whole = subprocess.run([*line, "max_new_tokens=3"], cwd=tmp_path, capture_output=True, check=True).stdout
    process = subprocess.Popen([*line, "max_new_tokens=1000000"], cwd=tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(5) == whole[:5]
    process.stdout.close()  # it stops, and it has done what was wanted
    assert process.wait(60) == 0


def default_hangup() -> None:
    """Restore the default action of SIGHUP, which is ignored if the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.slow
def test_a_terminal_that_closes_stops_a_run_after_a_checkpoint_unless_it_is_ignored(
    corpus: Path, tmp_path: Path, gone: int
) -> None:
    words = [*TINY_RUN, f"data.path={corpus}", "trainer.max_steps=100000", "validation.every=0", "run_dir=run"]
    line = [sys.executable, str(ROOT / "scripts/train.py"), *words]
    for start, code in ([], 128 + signal.SIGHUP), (["nohup"], 128 + signal.SIGTERM):
        process = subprocess.Popen([*start, *line], cwd=tmp_path, stdout=gone, stderr=gone, preexec_fn=default_hangup)
        newest = max(tmp_path.glob("run/checkpoints/*"), default=None)
        deadline = time.monotonic() + 120
        while max(tmp_path.glob("run/checkpoints/*"), default=None) == newest:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGHUP)
        if start:
            time.sleep(0.5)
            process.terminate()
        assert process.wait(60) == code
