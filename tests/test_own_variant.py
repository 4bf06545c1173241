"""docs/own-variant.md: its files are written, its commands typed and its code executed as they stand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from lm import results

BLOCK = re.compile(r"^```(python|yaml|text)\n(?:# (mine[\w./]*)\n)?(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_a_class_gets_a_verdict(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # for `python`
        "PYTHONPATH": str(ROOT),
    }
    printed = ""
    for language, name, content in BLOCK.findall((ROOT / "docs/own-variant.md").read_text()):
        if name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
            continue
        shell = ["bash", "-e", "-c"] if language == "text" else [sys.executable, "-c"]
        answer = subprocess.run([*shell, content], cwd=tmp_path, env=environment, text=True, capture_output=True)
        assert answer.returncode == 0, answer.stderr
        printed = answer.stdout
    assert printed.split()[0] in ("better", "worse", "equivalent", "undecided")
    runs = results.runs(tmp_path / "ablations/reglu", settings=["model.ffn"])
    assert list(runs.groupby(["arm", "model.ffn"]).size().items()) == [
        (("reglu", "mine.ReGLU"), 3),
        (("swiglu", "swiglu"), 3),
    ]
    assert runs["n_params"].nunique() == 1
    command = json.loads((tmp_path / "ablations/reglu/ablation.json").read_text())["command"]
    assert command.startswith("python -m lm ablate --config-dir mine ablation=reglu")
