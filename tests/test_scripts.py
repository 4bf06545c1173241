"""The scripts as a user types them: real processes, their output, their exit codes, and what ends them."""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, TINY_RUN, Script

from lm import generate, load_model
from tests.helpers.runs import wait_for

PROMPT = """def f(x, y):  # {"a": '1', ${b}}, c=[1,2] \\ """
slow = pytest.mark.slow


@pytest.fixture
def run_dir(script: Script, corpus: Path, tmp_path: Path) -> Path:
    answer = script("train", *TINY_RUN, f"data.path={corpus}", "run_dir=a run")
    assert answer.returncode == 0, answer.stderr
    with open(tmp_path / "a run/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["val/loss"]]
    assert [row["step"] for row in rows] == ["10", "20"]
    losses = f"train/loss {float(rows[0]['train/loss']):.3f}, val/loss {float(rows[0]['val/loss']):.3f}"
    assert f"step 10 of 20: {losses} on {rows[0]['val/tokens']} of {rows[1]['val/tokens']} tokens" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert "validation loss" in answer.stdout
    return tmp_path / "a run"


def start(name: str, *args: str, before: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
    line = [*before, sys.executable, str(ROOT / f"scripts/{name}.py"), *args]
    return subprocess.Popen(line, text=True, **options)


def test_a_script_of_another_checkout_says_whose_code_it_runs(tmp_path: Path) -> None:
    """Of two copies of the project, one is installed."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm/__init__.py").touch()
    for checkout in (tmp_path, ROOT):
        line = [sys.executable, checkout / "scripts/train.py", "--version"]
        answer = subprocess.run(line, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True)
        assert (answer.returncode, str(ROOT / "lm") in answer.stderr) == (0, checkout != ROOT)


def test_train_then_generate_verbatim(script: Script, run_dir: Path) -> None:
    answer = script("generate", "run_dir=a run", f"prompt={PROMPT}", "max_new_tokens=12", "threads=1")
    assert (answer.returncode, answer.stderr) == (0, "")
    net, tokenizer = load_model(run_dir)
    assert answer.stdout == PROMPT + generate(net, tokenizer, PROMPT, 12) + "\n"


@slow
def test_every_script_on_one_run(script: Script, run_dir: Path, corpus: Path, tmp_path: Path) -> None:
    again = script("train", *TINY_RUN, f"data.path={corpus}", "run_dir=a run")
    assert again.returncode == 0
    assert "is finished" in again.stderr
    assert "validation loss" in again.stdout
    assert script("generate", "run_dir=a run", "prompt_file=-", "max_new_tokens=3", input="def ").stdout[:4] == "def "
    words = ("generate", "run_dir=a run", "prompt=d", "temperature=1.0")
    first, same, other = (script(*words, f"seed={seed}").stdout for seed in (1, 1, 2))
    assert first == same != other
    typed = script("generate", "run_dir=a run", "interactive=true", "max_new_tokens=3", input="def \nclass \n")
    assert typed.returncode == 0
    assert typed.stdout.startswith("def ")
    assert "\nclass " in typed.stdout
    several = script(*words, "n_samples=2", "top_k=20", "min_p=0.01", "seed=1").stdout
    assert several.startswith("=== sample 1 of 2\nd")
    assert "\n=== sample 2 of 2\nd" in several
    both = script("generate", "run_dir=[a run,a run/model]", "prompt=d", "max_new_tokens=3", "top=2")
    assert [line for line in both.stdout.splitlines() if line.startswith("===")] == ["=== a run", "=== a run/model"]
    assert both.stderr.count("top 2") == 2
    assert both.stderr.count("%") == 2 * 2 * 3
    scores = script("evaluate", "run_dir=a run", "threads=1")
    assert json.loads(scores.stdout)["loss"] == json.loads((run_dir / "result.json").read_text())["val_loss"]
    assert "bpb" in scores.stderr
    elsewhere = script("evaluate", "run_dir=a run", "data=text", f"data.path={corpus}")
    assert json.loads(elsewhere.stdout)["bytes"] == len(corpus.read_bytes())
    assert script("export", "run_dir=a run", "output_dir=out", "trust=true").returncode == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"config.json", "model.safetensors"}
    assert script("export", "run_dir=a run", "output_dir=out").returncode == 2


@slow
def test_a_reader_that_leaves_ends_a_command_without_a_word(script: Script, run_dir: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start("generate", "run_dir=a run", "prompt=x", "max_new_tokens=1000000", **options) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.read(1) == "x"
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (1, "")
    with open("/dev/full", "w") as full:
        shown = start("train", "run_dir=a run", cwd=tmp_path, stdout=full, stderr=subprocess.PIPE)
        assert shown.communicate(timeout=60)[1].splitlines()[-1].startswith("error: No space left on device; free")
    assert shown.returncode == 1


@slow
def test_a_sweep_runs_each_job_and_compares_them(script: Script, corpus: Path, tmp_path: Path) -> None:
    answer = script("train", *TINY_RUN, f"data.path={corpus}", "-m", "head=tied,untied", "seed=0,1")
    assert answer.returncode == 0, answer.stderr
    results = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/result.json")]
    pairs = sorted((result["head"], result["seed"]) for result in results)
    assert pairs == [("tied", 0), ("tied", 1), ("untied", 0), ("untied", 1)]
    last = answer.stdout.strip().splitlines()[-9:]
    assert last[0].split() == ["run", "val_loss", "val_bpb", "val_top1", "parameters", "seconds"]
    assert last[6].split("  ")[0] == "settings"
    assert [line.split()[-5:-3] for line in last[7:]] == [["head=tied", "2"], ["head=untied", "2"]]


@slow
def test_unusable_texts_are_a_line_for_each_and_leave_no_run(script: Script, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    texts = "data.path=absent.txt,empty.txt,latin.txt"
    answer = script("train", "-m", "data=text", "tokenizer=byte", "trainer=cpu", texts)
    assert answer.returncode == 2, answer.stderr
    starts = ("data.path=absent.txt: no such file", "data.path=empty.txt: the text is empty", "latin.txt: not UTF-8")
    for line, begin in zip(answer.stderr.splitlines(), starts, strict=True):
        assert line.startswith(f"error: {begin}")
        assert line.endswith(f"data.path={begin.removeprefix('data.path=').partition(':')[0]})")
    assert [path.name for path in (tmp_path / "runs").rglob("*")] == ["multirun.yaml"]


@slow
def test_a_job_in_a_process_of_its_own_ends_the_sweep_with_its_code(
    script: Script, corpus: Path, tmp_path: Path
) -> None:
    """As under Hydra's launchers for joblib and submitit: what a job notes in its own process does not come back."""
    plugins = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests/plugins"), os.environ.get("PYTHONPATH", "")])}
    line = ("-m", "hydra/launcher=processes", *TINY_RUN, f"data.path=absent.txt,{corpus}", "seed=1")
    answer = script("train", *line, env=plugins)
    assert answer.returncode == 2
    last = answer.stderr.splitlines()[-1]
    assert last == "error: a job of the sweep failed: data.path=absent.txt: no such file, folder or glob"
    assert "Traceback" not in answer.stderr
    assert "20 steps" in answer.stderr  # messages come from the other process too
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 1


# --- what ends a command


@slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_resume_it(tmp_path: Path, corpus: Path, signum: signal.Signals) -> None:
    corpus.rename(tmp_path / "my file.txt")
    words = [*TINY_RUN, "data.path=my file.txt", "run_dir=run", "trainer.max_steps=1000"]
    process = start("train", *words, cwd=tmp_path, stderr=subprocess.PIPE)
    wait_for(lambda: list(tmp_path.glob("run/checkpoints/step-*")))
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert "Traceback" not in errors
    message, _, line = errors.splitlines()[-1].partition("; resume with: ")
    assert re.fullmatch(rf"stopped by {signum.name} after step \d+", message)
    assert shlex.split(line) == [sys.executable, str(ROOT / "scripts/train.py"), *words]
    with start("generate", "run_dir=run", "prompt=x", "max_new_tokens=1", cwd=tmp_path, stderr=subprocess.PIPE) as note:
        assert note.communicate(timeout=60)[1].startswith("run_dir=run: is unfinished")
    again = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "resuming from step-" in again.stderr


@slow
def test_an_interrupted_ablation_says_how_to_resume_it(tmp_path: Path, corpus: Path) -> None:
    corpus.rename(tmp_path / "my file.txt")
    words = ["ablation=smoke", *TINY_RUN, "tokenizer.vocab_size=null", "data.path=my file.txt", "output_dir=out"]
    words = [*words, "trainer.max_steps=3000", "ablation.overrides=[]"]
    process = start("ablate", *words, cwd=tmp_path, stderr=subprocess.PIPE)
    wait_for(lambda: list(tmp_path.glob("out/cells/*/checkpoints/step-*")))
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "Traceback" not in errors
    message, _, line = errors.splitlines()[-1].partition("; resume with: ")
    assert message == "interrupted"
    assert shlex.split(line) == [sys.executable, str(ROOT / "scripts/ablate.py"), *words]
    record = json.loads((tmp_path / "out/ablation.json").read_text())
    assert shlex.split(record["command"]) == ["python", "scripts/ablate.py", *words]


@slow
@pytest.mark.parametrize(
    ("name", "args"), [("generate", ["run_dir=.", "prompt_file=-"]), ("train", ["tokenizer.vocab_size=4000"])]
)
def test_where_nothing_can_be_resumed_nothing_is_offered(name: str, args: list[str], tmp_path: Path) -> None:
    process = start(name, *args, cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(3)  # until it reads
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[1].splitlines()[-1] == "interrupted"
    assert process.returncode == 143


@slow
def test_a_terminal_that_closes_stops_a_run_after_a_checkpoint_unless_it_is_ignored(
    corpus: Path, tmp_path: Path
) -> None:
    words = [*TINY_RUN, f"data.path={corpus}", "trainer.max_steps=100000", "validation.every=0", "run_dir=run"]
    reading, writing = os.pipe()
    os.close(reading)  # nobody reads what it writes

    for before, code in ((), 128 + signal.SIGHUP), (("nohup",), 128 + signal.SIGTERM):
        options = {"stdout": writing, "stderr": writing, "cwd": tmp_path}
        process = start("train", *words, before=before, **options)
        newest = max(tmp_path.glob("run/checkpoints/*"), default=None)
        wait_for(lambda newest=newest: max(tmp_path.glob("run/checkpoints/*"), default=None) != newest)  # type: ignore[misc]
        process.send_signal(signal.SIGHUP)
        if before:
            time.sleep(0.5)
            process.terminate()
        assert process.wait(60) == code


@slow
def test_a_killed_process_of_several_is_one_line_that_says_how_to_resume(corpus: Path, tmp_path: Path) -> None:
    words = [*TINY_RUN, f"data.path={corpus}", "trainer.devices=2", "trainer.max_steps=100000", "run_dir=run"]
    process = start("train", *words, "validation.every=0", cwd=tmp_path, stderr=subprocess.PIPE)
    wait_for(lambda: list(tmp_path.glob("run/checkpoints/step-*")))
    (other,) = psutil.Process(process.pid).children()
    other.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert re.search(r"^error: another process of this run has ended \(.*\); resume with: .*train.py", errors, re.M)


@slow
def test_a_compiler_that_is_not_there_is_one_line(script: Script, corpus: Path, tmp_path: Path) -> None:
    own = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    small = [*TINY_RUN, f"data.path={corpus}", "trainer.max_steps=1"]
    answer = script("train", *small, "compile=true", "run_dir=run", env=own)
    assert answer.returncode == 2
    assert "Traceback" not in answer.stderr
    assert re.search(r"^error: compile=true: .*no-such-compiler", answer.stderr, re.MULTILINE)


@slow
def test_configurations_of_ones_own_come_from_a_folder(script: Script, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "my_configs/ablation").mkdir(parents=True)
    (tmp_path / "my_configs/model").mkdir()
    (tmp_path / "my_configs/ablation/dropout.yaml").write_text(
        "question: Does dropout help on my text?\narms:\n  none: []\n  some: [model.dropout=0.1]\n"
        f"baseline: none\nseeds: [0, 1]\nequivalence_margin: 0.01\noverrides: [data=text, 'data.path={corpus}']\n"
    )
    (tmp_path / "my_configs/model/mine.yaml").write_text("defaults: [small]\nn_layers: 1\nd_model: 32\nd_ff: 32\n")
    small = ["model=mine", "tokenizer=byte", "trainer.max_steps=4", "threads=1"]
    answer = script("ablate", "--config-dir", "my_configs", "ablation=dropout", *small, "output_dir=out")
    assert answer.returncode == 0, answer.stderr
    record = json.loads((tmp_path / "out/ablation.json").read_text())
    assert (record["name"], record["question"]) == ("dropout", "Does dropout help on my text?")
    assert record["command"].startswith("python scripts/ablate.py --config-dir my_configs ablation=dropout")
    assert record["arms"]["some"]["settings"]["model.n_layers"] == 1
