"""The scripts as a user types them: real processes, their output and their exit codes."""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY_RUN, Script, some

from lm import generate, load_model

PROMPT = """def f(x, y):  # {"a": '1', ${b}}, c=[1,2] \\ """


@pytest.fixture
def run_dir(script: Script, corpus: Path, tmp_path: Path) -> Path:
    answer = script("train", *TINY_RUN, f"data.path={corpus}", "run_dir=a run")
    assert answer.returncode == 0, answer.stderr
    with open(tmp_path / "a run/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["val/loss"]]
    for row, scored in zip(rows, ("SOME of ALL", "all ALL"), strict=True):
        losses = f"train/loss {float(row['train/loss']):.3f}, val/loss {float(row['val/loss']):.3f}"
        where = scored.replace("SOME", rows[0]["val/tokens"]).replace("ALL", rows[1]["val/tokens"])
        assert f"step {row['step']} of 20: {losses} on {where} tokens, 00:0" in answer.stderr
    assert ", 00:00 left\n" in answer.stderr
    assert [row["step"] for row in rows] == ["10", "20"]
    assert "Traceback" not in answer.stderr
    assert "validation loss" in answer.stdout
    assert "zlib" in answer.stdout
    return tmp_path / "a run"


def test_train_then_generate_verbatim(script: Script, run_dir: Path) -> None:
    answer = script("generate", "run_dir=a run", f"prompt={PROMPT}", "max_new_tokens=12", "threads=1")
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""
    net, tokenizer = load_model(run_dir)
    assert answer.stdout == PROMPT + generate(net, tokenizer, PROMPT, 12) + "\n"


@pytest.mark.parametrize(
    ("name", "words", "said"),
    some(
        [
            ("train", ["data=text", "data.path=none"], "data.path=none: no such file, folder or glob"),
            ("train", ["tokenizer=file", "tokenizer.path=none"], "tokenizer.path=none: no such file"),
            ("train", ["trainer.max_steps=-3"], "trainer.max_steps=-3: expected a number of steps, 1 or more"),
            ("ablate", ["data=json", "data.path=."], "data.path=.: a folder without .json or .jsonl"),
            ("ablate", ["plan_onyl=true"], "plan_onyl: no such key; did you mean plan_only?"),
            ("ablate", ["max_steps=3"], "max_steps: no such key; did you mean trainer.max_steps?"),
            ("ablate", ["seeds=[0,1]"], "seeds: no such key; did you mean ablation.seeds?"),
            (
                "ablate",
                ["ablation.tune.hyperparameters=[optim.lrr]"],
                "ablation.tune.hyperparameters: optim.lrr is none of a run's settings",
            ),
            ("generate", ["run_dir=none", "prompt=x"], "run_dir=none: no such folder"),
            ("evaluate", ["run_dir=."], "run_dir=.: holds no model"),
            ("export", ["run_dir=none", "output_dir=out"], "run_dir=none: no such folder"),
            ("report", ["output_dir=none"], "output_dir=none: no such folder"),
        ],
        2,
    ),
)
def test_a_mistake_is_told_before_torch_is_imported(script: Script, name: str, words: list[str], said: str) -> None:
    answer = script(name, *words, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert answer.returncode == 2
    assert f"\nerror: {said}" in answer.stderr
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "lm.config" in imported
    assert not {"torch", "lightning"} & imported


@pytest.mark.slow
def test_every_script_on_one_run(script: Script, run_dir: Path, corpus: Path, tmp_path: Path) -> None:
    again = script("train", *TINY_RUN, f"data.path={corpus}", "run_dir=a run")
    assert again.returncode == 0
    assert "is finished" in again.stderr
    assert "validation loss" in again.stdout

    from_stdin = script("generate", "run_dir=a run", "prompt_file=-", "max_new_tokens=3", input="def ")
    assert from_stdin.stdout.startswith("def ")
    both = script("generate", "run_dir=a run", "prompt_file=-", "prompt=x")
    assert (both.returncode, both.stderr.count("\n")) == (2, 1)
    words = ("generate", "run_dir=a run", "prompt=d", "temperature=1.0")
    first, again, other = (script(*words, f"seed={seed}").stdout for seed in (1, 1, 2))
    assert first == again != other
    typed = script("generate", "run_dir=a run", "interactive=true", "max_new_tokens=3", input="def \nclass \n")
    assert typed.returncode == 0
    assert typed.stdout.startswith("def ")
    assert "\nclass " in typed.stdout
    several = script(*words, "n_samples=2", "top_k=20", "min_p=0.01", "seed=1").stdout
    assert several.startswith("=== sample 1 of 2\nd")
    assert "\n=== sample 2 of 2\nd" in several

    scores = script("evaluate", "run_dir=a run", "threads=1")
    result = json.loads((run_dir / "result.json").read_text())
    assert json.loads(scores.stdout)["loss"] == result["val_loss"]
    assert "bpb" in scores.stderr
    other = script("evaluate", "run_dir=a run", "data=text", f"data.path={corpus}")
    assert json.loads(other.stdout)["bytes"] == len(corpus.read_bytes())

    refused = script("export", "run_dir=a run", "output_dir=out", "trust=true")
    assert refused.returncode == 0, refused.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"config.json", "model.safetensors"}
    assert script("export", "run_dir=a run", "output_dir=out").returncode == 2

    piped = subprocess.run(
        f"{sys.executable} {ROOT}/scripts/generate.py 'run_dir=a run' prompt=x max_new_tokens=2000 | head -c 1",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert piped.stderr == ""


@pytest.mark.slow
def test_a_sweep_runs_each_job_and_compares_them(script: Script, corpus: Path, tmp_path: Path) -> None:
    answer = script("train", *TINY_RUN, f"data.path={corpus}", "-m", "head=tied,untied", "seed=0,1")
    assert answer.returncode == 0, answer.stderr
    results = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/result.json")]
    assert sorted((one["head"], one["seed"]) for one in results) == [
        ("tied", 0),
        ("tied", 1),
        ("untied", 0),
        ("untied", 1),
    ]
    last = answer.stdout.strip().splitlines()[-9:]
    assert last[0].split() == ["run", "val_loss", "val_bpb", "val_top1", "parameters", "seconds"]
    assert last[6].split("  ")[0] == "settings"
    assert [line.split()[-5:-3] for line in last[7:]] == [["head=tied", "2"], ["head=untied", "2"]]
    broken = script("train", *TINY_RUN, f"data.path={corpus}", "-m", "model.n_heads=2,3")
    assert broken.returncode == 2
    assert "error: model.d_model=32 is not divisible by model.n_heads=3" in broken.stderr
    assert "Traceback" not in broken.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_prints_the_command_that_resumes_it(
    tmp_path: Path, corpus: Path, signum: signal.Signals, code: int
) -> None:
    corpus.rename(tmp_path / "my file.txt")
    words = [*TINY_RUN, "data.path=my file.txt", "run_dir=run", "trainer.max_steps=1000"]
    process = subprocess.Popen(
        [sys.executable, ROOT / "scripts/train.py", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("run/checkpoints/step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in errors
    last = errors.splitlines()[-1]
    assert re.match(rf"stopped by {signum.name} after step \d+; resume with: ", last)
    command = last.partition("resume with: ")[2]
    assert shlex.split(command) == [sys.executable, str(ROOT / "scripts/train.py"), *words]
    again = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "resuming run from step-" in again.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_ablation_prints_the_command_that_resumes_it(
    tmp_path: Path, corpus: Path, signum: signal.Signals, code: int
) -> None:
    corpus.rename(tmp_path / "my file.txt")
    words = ["ablation=smoke", *TINY_RUN, "tokenizer.vocab_size=null", "data.path=my file.txt", "output_dir=out"]
    words = [*words, "trainer.max_steps=3000", "ablation.overrides=[]"]
    line = [sys.executable, str(ROOT / "scripts/ablate.py"), *words]
    process = subprocess.Popen(line, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out/cells/*/checkpoints/step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert "Traceback" not in errors
    said, _, command = errors.splitlines()[-1].partition("; resume with: ")
    assert said == "interrupted"
    assert shlex.split(command) == line
    record = json.loads((tmp_path / "out/ablation.json").read_text())
    assert shlex.split(record["command"]) == ["python", "scripts/ablate.py", *words]


@pytest.mark.slow
def test_a_command_that_cannot_be_resumed_offers_nothing(tmp_path: Path) -> None:
    line = [sys.executable, str(ROOT / "scripts/generate.py"), "run_dir=.", "prompt_file=-"]
    process = subprocess.Popen(line, cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(3)  # until it reads
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (143, "interrupted\n")


@pytest.mark.slow
def test_a_job_that_fails_in_a_process_of_its_own_ends_the_sweep_with_its_code(
    script: Script, corpus: Path, tmp_path: Path
) -> None:
    """As under Hydra's launchers for joblib and submitit: what a job notes in its own process does not come back."""
    plugins = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests/plugins"), os.environ.get("PYTHONPATH", "")])}
    line = ("-m", "hydra/launcher=processes", *TINY_RUN, f"data.path=absent.txt,{corpus}", "seed=1")
    answer = script("train", *line, env=plugins)
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[-1] == (
        "error: a job of the sweep failed: data.path=absent.txt: no such file, folder or glob"
    )
    assert "Traceback" not in answer.stderr
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 1  # the other job was run
    whole = script("train", "-m", "hydra/launcher=processes", *TINY_RUN, f"data.path={corpus}", "seed=2", env=plugins)
    assert whole.returncode == 0, whole.stderr
    assert "20 steps" in whole.stderr  # our messages come from there too


@pytest.mark.slow
def test_configurations_of_ones_own_come_from_a_folder(script: Script, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "my_configs/ablation").mkdir(parents=True)
    (tmp_path / "my_configs/model").mkdir()
    (tmp_path / "my_configs/ablation/dropout.yaml").write_text(
        "question: Does dropout help on my text?\narms:\n  none: []\n  some: [model.dropout=0.1]\n"
        f"baseline: none\nseeds: [0, 1]\nequivalence_margin: 0.01\noverrides: [data=text, 'data.path={corpus}']\n"
    )
    (tmp_path / "my_configs/model/mine.yaml").write_text("defaults: [small]\nn_layers: 1\nd_model: 32\nd_ff: 32\n")
    small = ["model=mine", "tokenizer=byte", "trainer.max_steps=4", "threads=1"]
    own = ("--config-dir", "my_configs")
    answer = script("ablate", *own, "ablation=dropout", *small, "output_dir=out")
    assert answer.returncode == 0, answer.stderr
    record = json.loads((tmp_path / "out/ablation.json").read_text())
    assert (record["name"], record["question"]) == ("dropout", "Does dropout help on my text?")
    assert record["command"].startswith("python scripts/ablate.py --config-dir my_configs ablation=dropout")
    assert record["arms"]["some"]["settings"]["model.n_layers"] == 1
    answer = script("train", *own, *small, "data=text", f"data.path={corpus}", "trainer=cpu", "run_dir=run")
    assert answer.returncode == 0, answer.stderr
