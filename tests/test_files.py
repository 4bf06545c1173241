"""Files that are whole, whatever fails while they are written."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, small_disk

from lm.errors import UserError, reading
from lm.system.files import atomic_file, read_csv, read_json, read_yaml, remove_partial
from lm.training.run_directory import read_samples
from tests.helpers.writing import write_and_die, write_with_faults


def in_a_process(work, *args):
    """The exit code of a process that does some work."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=args)
    process.start()
    process.join()
    return process.exitcode


def test_a_line_that_broke_off_is_left_out(tmp_path):
    whole = [{"step": step, "samples": []} for step in (1, 2)]
    lines = [json.dumps(line) for line in whole]
    (tmp_path / "a.jsonl").write_text("\n".join([lines[0], '{"ste', '{"step": 1}', "5", lines[1], '{"st']))
    assert read_samples(tmp_path / "a.jsonl") == whole
    (tmp_path / "a.csv").write_text("step,tokens\n1,100\n2,20")  # of 200
    assert read_csv(tmp_path / "a.csv", whole=False) == [{"step": "1", "tokens": "100"}]


@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_what_holds_something_else_is_named(tmp_path, read):
    path = tmp_path / "file"
    for content in (b"", b"[1, 2]", b"{", b"\xff", b"a: !!python/name:os.system"):
        path.write_bytes(content)
        with pytest.raises(UserError) as caught, reading(path):
            read(path)
        assert str(caught.value).startswith(f"{path}: not what lm wrote (")
        assert "\n" not in str(caught.value)


def test_what_a_killed_process_left_goes_with_the_next_holder_of_the_lock(tmp_path):
    folders = [tmp_path / "runs", run := tmp_path / "runs/one"]
    run.mkdir(parents=True)
    assert in_a_process(write_and_die, folders) == -signal.SIGKILL
    remove_partial(tmp_path)
    assert [path.parent for path in tmp_path.rglob(".partial-*-killed")] == [run], "which has a lock of its own"
    remove_partial(run)
    assert not [*tmp_path.rglob(".partial-*")]


def test_an_error_names_the_file_whatever_raises_it(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    with pytest.raises(OSError, match="No space left") as caught, small_disk(), atomic_file(path) as file:
        np.zeros(10_000).tofile(file)  # its error has no number
    assert (caught.value.errno, caught.value.filename, os.listdir(tmp_path)) == (errno.ENOSPC, str(path), [])

    def read_only(*given, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "temporary")

    monkeypatch.setattr("builtins.open", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(OSError, match="Read-only") as caught, atomic_file(path):
        pass
    assert caught.value.filename == str(path)


def test_whatever_fails_while_a_file_is_written_it_is_the_old_or_the_new_one(tmp_path):
    assert in_a_process(write_with_faults, tmp_path) == 0


@pytest.mark.nightly
def test_the_fault_campaign_finds_no_defect():
    command = [sys.executable, "-m", "scripts.faults", "minutes=5"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert answer.returncode == 0, answer.stdout + answer.stderr
