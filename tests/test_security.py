"""What SECURITY.md says: what commands write, start and connect to, and that nothing from a file executes or steers."""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lm.data.tokenizer import byte_tokenizer
from lm.decoding import generate
from lm.errors import UserError, without_secrets
from lm.lab.report.figures import shorten
from lm.lab.report.pages import render
from lm.scoring import Scores
from lm.training.run_directory import default_directory
from tests.helpers import ROOT
from tests.helpers.models import build
from tests.helpers.refusals import refused
from tests.helpers.runs import composed
from tests.helpers.tiny import TINY_RUN


def test_no_text_in_a_report_steers_a_terminal():
    answer = {"sentence": "a\x1b[31m: b", "verdict": "better", "weakened": ["c\x1b[31m"]}
    context = {"answers": [answer], "basis": {}, "comparisons": [], "warnings": [], "is_unfinished": False}
    assert "\x1b" not in render("ablation.md.j2", question="b\x1b[31m", unit="", ci="", digits=3, **context)
    assert "\x1b" not in shorten("a\x1b[31m")


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("data.path=https://me:a%20b@host/a.txt?sig=x/y.z#w: not found", "data.path=https://host/a.txt: not found"),
        ("(cannot read https://token@host:8/d, why?)", "(cannot read https://host:8/d, why?)"),
        ("'x=s3://bucket/a@b.txt?versionId=1' seed=1", "'x=s3://bucket/a@b.txt' seed=1"),
        ("zip://a.txt::https://me:pw@host/f.zip?x=1", "zip://a.txt::https://host/f.zip"),
        ("hf://datasets/owner/name@main/a.txt, me@host, who?", "hf://datasets/owner/name@main/a.txt, me@host, who?"),
    ],
)
def test_an_address_is_said_without_what_gives_access(text, public):
    assert without_secrets({"a": [text, 1, None]}) == {"a": [public, 1, None]}
    assert str(UserError(text)) == public


@pytest.mark.slow
def test_the_address_of_a_text_is_published_without_what_gives_access(
    finished_run, text_file, tmp_path, command, monkeypatch
):
    """By all that shows a run; config.yaml keeps it, for a resume reads it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_run, "runs/a")
    secret = "https://me:PASSWORD@host/a.txt?sig=SIGNATURE"
    config = tmp_path / "runs/a/config.yaml"
    config.write_text(config.read_text().replace(str(text_file), secret))
    (tmp_path / "runs/b").mkdir()
    (tmp_path / "runs/b/config.yaml").write_text(config.read_text().replace("/a.txt", "/b.txt"))
    words = [("runs", "csv=-"), ("runs",), ("report", "runs/a"), ("evaluate", "runs/a")]
    words += [("export", "runs/a", "output_dir=out")]
    said = [str(command(*line)) for line in words]
    said += [str(default_directory(composed("run_dir=runs/a"), "0" * 8))]
    said += [Path(name).read_text() for name in ("runs/a/report.html", "out/README.md")]
    assert not re.search("PASSWORD|SIGNATURE", "".join(said))
    assert "https://host/a.txt" in said[-1]


def test_weights_that_are_no_numbers_neither_decode_nor_fail_a_score():
    net = build("tied", 257)
    torch.nn.init.constant_(net.norm.weight, math.nan)
    with refused("logits are NaN"):
        generate(net, byte_tokenizer(), "a")
    assert Scores(1, 800.0, 0).perplexity is None


WATCHED = """
import os, sys
from lm.cli.main import main
log = None
def watch(event, args):
    if log is None:
        return
    if event == "open" and isinstance(args[0], str) and args[2] & 3:
        log.add(os.path.abspath(args[0]))
    elif event == "os.rename":
        log.add(os.path.abspath(args[1]))
    elif event in ("socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"):
        log.add(event)
sys.addaudithook(watch)
for line in sys.stdin.read().splitlines():
    log, sys.argv = set(), ["scripts/" + line.split()[0] + ".py", *line.split()[1:]]
    try:
        main(line.split()[0])
    except SystemExit as end:
        print("LOG", end.code, *log)
    log = None
"""


@pytest.mark.nightly
def test_commands_write_where_they_say_and_start_and_reach_nothing(tmp_path):
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 400)
    lines = {  # a command -> its exit code, and what it writes to, starts and reaches
        f"train {' '.join(TINY_RUN)} data.path=text.txt data.cache_dir=cache run_dir=run": (0, {"run", "cache"}),
        "generate run_dir=run prompt=def max_new_tokens=2": (0, set()),
        "evaluate run_dir=run": (0, set()),
        "export run_dir=run output_dir=out": (0, {"out"}),
        "report run_dir=run": (0, {"run"}),
        "evaluate run_dir=run data=text data.path=http://127.0.0.1:9/text": (2, {"socket.connect"}),
    }
    done = subprocess.run(
        [sys.executable, "-c", WATCHED],
        input="\n".join(lines),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "0"},
        text=True,
        capture_output=True,
        check=True,
    )
    logs = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("LOG ")]
    for (line, (code, expected)), (end, *places) in zip(lines.items(), logs, strict=True):
        written = {place.removeprefix(f"{tmp_path}/") for place in places}
        own = {place.partition("/")[0] for place in written if not place.startswith(("/dev/", "/tmp/"))}
        assert (int(end), own) == (code, expected), line
