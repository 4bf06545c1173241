"""The commands as a user types them, from the checkout and from a wheel: output, exit codes, and what ends them."""

import csv
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, stdev

import psutil
import pytest

from lm import generate, load_model
from tests.helpers import ROOT
from tests.helpers.runs import result, signalled, wait_for
from tests.helpers.tiny import TEXT, TINY_RUN

PROMPT = """def f(x, y):  # {"a": '1', ${b}}, c=[1,2] \\ """
slow = pytest.mark.slow


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    """An empty folder to be in, but for a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my file.txt").write_text(TEXT)
    return tmp_path


def start(name, *args, before=(), **options):
    return subprocess.Popen([*before, sys.executable, ROOT / f"scripts/{name}.py", *args], text=True, **options)


def test_a_text_becomes_a_run_a_score_an_export_a_list_a_report_and_a_verdict(command, cwd):
    """Also where Ctrl-C stops the run: the line that it prints resumes it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = [*TINY_RUN, "data.path=my file.txt", "run_dir=runs/a run"]
    with signalled(7, signal.SIGINT):
        code, _, errors = command("train", "checkpoint.resume=false", *words)  # which is not asked for again
    message, _, line = errors.splitlines()[-1].partition("; resume with: ")
    assert (code, message) == (130, "stopped by Ctrl-C after step 7")
    assert shlex.split(line) == ["python", "scripts/train.py", *words]
    assert "is unfinished" in command("generate", "runs/a run", "x", "max_new_tokens=1")[2]

    code, out, errors = command("train", *words)
    assert (code, "resuming from step 7" in errors) == (0, True)
    scores = result(cwd / "runs/a run")
    assert scores["resumed_from"] == [7]
    code, shown, errors = command("train", "run_dir=runs/a run")
    assert (code, shown, "resuming" in errors) == (0, out, False)

    code, out, errors = command("generate", "runs/a run", f"prompt={PROMPT}", "max_new_tokens=12", "threads=1")
    net, tokenizer = load_model("runs/a run")
    assert (code, out, errors) == (0, PROMPT + generate(net, tokenizer, PROMPT, 12) + "\n", "")
    code, out, _ = command("evaluate", "runs/a run", "threads=1")
    assert (code, json.loads(out)["loss"]) == (0, pytest.approx(scores["val_loss"], rel=1e-5))
    code, out, _ = command("runs", "csv=-")
    (row,) = csv.DictReader(io.StringIO(out))
    assert (code, row["run"], float(row["val_loss"])) == (0, "a run", scores["val_loss"])
    assert command("export", "runs/a run", "output_dir=out")[0] == 0
    theirs = AutoTokenizer.from_pretrained("out")
    ids = theirs(PROMPT, return_tensors="pt")
    (answer,) = AutoModelForCausalLM.from_pretrained("out").generate(**ids, do_sample=False, max_new_tokens=12)
    assert theirs.decode(answer, skip_special_tokens=True) == PROMPT + generate(net, tokenizer, PROMPT, 12)
    assert command("report", "runs/a run")[0] == 0
    assert "<svg" in (cwd / "runs/a run/report.html").read_text()
    code, out, _ = command("ablate", "model.dropout=0,0.1", *words[:-1], "seeds=3", "output_dir=ab", "json=true")
    assert (code, json.loads(out)["runs"]["done"]) == (0, 6)
    assert "dropout=0.1 is worse than 0" in (cwd / "ab/report.md").read_text()


def test_generate_in_every_way(command, finished_run, monkeypatch):
    monkeypatch.chdir(finished_run.parent)

    def generated(*words, content=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
        code, out, _ = command("generate", f"run_dir={finished_run.name}", *words, "threads=1")
        assert code == 0
        return out

    short, drawn = "max_new_tokens=3", "temperature=1.0"
    Path("marked.txt").write_bytes(b"\xef\xbb\xbfdef ")  # with the byte-order mark of an editor
    expected = generated("prompt=def ", short)
    assert generated("prompt_file=-", short, content="def ") == generated("prompt_file=marked.txt", short) == expected
    first = generated("prompt=d", drawn, "seed=1")
    typed = generated("interactive=true", drawn, "seed=1", content="\ufeffd\r\nd\r\n")
    assert typed.startswith(first)
    assert typed != first * 2, "each prompt is drawn anew"
    terminal = type("Terminal", (io.BytesIO,), {"isatty": lambda self: True})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(terminal("dé\n".encode("latin-1")), "latin-1"))
    assert "prompt> dé" in command("generate", "run_dir=a run", "interactive=true", short)[1], "its own encoding"
    several = generated("prompt=d", drawn, "n_samples=2", "top_k=20", "min_p=0.01", "seed=1")
    assert re.match(r"=== sample 1 of 2\nd(.|\n)*\n=== sample 2 of 2\nd", several)
    _, out, errors = command("generate", "run_dir=[a run,a run/model]", "prompt=d", short, "top=2")
    assert [line for line in out.splitlines() if line.startswith("===")] == ["=== a run", "=== a run/model"]
    assert (errors.count("top 2"), errors.count("%")) == (2, 2 * 2 * 3)


@slow
@pytest.mark.nightly
def test_a_reader_that_leaves_ends_a_command_without_a_word(finished_run):
    options = {"cwd": finished_run.parent, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start("generate", "run_dir=a run", "prompt=x", "max_new_tokens=1000000", **options) as process:
        assert process.stdout.read(1) == "x"
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (1, "")


@slow
def test_a_sweep_runs_each_job_and_compares_them(command, cwd):
    """One that fails: tests/test_cli.py."""
    words = [*TINY_RUN, "data.path=my file.txt", "trainer.max_steps=5", "head=tied,untied", "seed=0,1"]
    code, out, _ = command("train", "-m", *words)
    assert code == 0
    scores = [result(path.parent) for path in cwd.glob("runs/*/result.json")]
    head, *last = [re.split("  +", line) for line in out.strip().splitlines()[-3:]]
    assert head[:5] == ["head", "seeds", "mean val_loss", "sd", "standard error"]
    for name, line in zip(("tied", "untied"), last, strict=True):
        values = {score["seed"]: score["val_loss"] for score in scores if score["head"] == name}
        mean, sd = fmean(values.values()), stdev(values.values())
        assert {*values} == {0, 1}
        assert line[:5] == [name, "2", f"{mean:.4f}", f"{sd:.4f}", f"{sd / 2**0.5:.4f}"]


# --- what ends a command


@slow
@pytest.mark.nightly
def test_a_terminal_that_closes_stops_a_run_after_a_checkpoint_unless_nohup_ignores_it(cwd):
    words = [*TINY_RUN, "data.path=my file.txt", "trainer.max_steps=100000", "run_dir=run"]
    for before, code in ([], 128 + signal.SIGHUP), (["nohup"], 128 + signal.SIGTERM):
        newest = max(cwd.glob("run/checkpoints/*"), default=None)
        reading, writing = os.pipe()
        os.close(reading)  # nobody reads what the command writes
        process = start("train", *words, before=before, stdout=writing, stderr=writing)
        wait_for(lambda newest=newest: max(cwd.glob("run/checkpoints/*"), default=None) != newest, 300)
        process.send_signal(signal.SIGHUP)
        if before:
            time.sleep(0.5)
            process.terminate()
        assert process.wait(300) == code


@pytest.mark.nightly
def test_a_killed_process_of_several_is_one_line_that_says_how_to_resume(cwd):
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
def test_a_compiler_that_is_not_there_is_one_line(script, cwd):
    own = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(cwd / "cache")}
    words = [*TINY_RUN, "data.path=my file.txt", "trainer.max_steps=1", "compile=true", "run_dir=run"]
    answer = script("train", *words, env=own)
    assert (answer.returncode, "Traceback" in answer.stderr) == (2, False)
    assert re.search(r"^error: compile=true: .*no-such-compiler", answer.stderr, re.MULTILINE)


# --- what is installed


@slow
def test_the_installed_command_does_what_the_checkout_does_where_the_checkout_is_not(tmp_path):
    site = tmp_path / "site"
    install = ["pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site), str(ROOT)]
    subprocess.run([sys.executable, "-m", *install], check=True, capture_output=True)
    names = {path.relative_to(site).as_posix() for path in site.rglob("*")}
    configs = (path for suffix in ("yaml", "py") for path in (ROOT / "configs").rglob(f"*.{suffix}"))
    assert {f"lm/{path.relative_to(ROOT).as_posix()}" for path in configs} | {"lm/py.typed"} <= names
    assert not {"tests", "scripts", "docs"} & names
    env = {**os.environ, "PYTHONPATH": str(site), "PATH": f"{site / 'bin'}:{os.environ['PATH']}"}
    for words, shown in (
        ([sys.executable, "-c", "import lm; print(lm.__file__)"], f"{site}/lm/__init__.py\n"),
        (["lm-lab", "train", "--help"], "lm-lab train [TEXT] [group=choice]"),
        (["lm-lab", "train", "head=untied", "--cfg", "job"], "name: untied"),
    ):
        answer = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
        assert shown in answer.stdout
