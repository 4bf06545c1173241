"""What SECURITY.md says: what commands write, start and connect to, and no call that lets a file execute."""

import ast
import os
import re
from pathlib import Path

import pytest
from conftest import ROOT, TINY_RUN, Script

PAGE = (ROOT / "SECURITY.md").read_text()
SOURCES = sorted((ROOT / "lm").rglob("*.py"))
UNPICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "runpy", "code"}  # modules
CALLS = {"eval", "exec", "compile", "os.system", "os.popen", "torch.hub.load", "yaml.unsafe_load", "yaml.full_load"}
OPTIONS = ("shell", "allow_pickle", "trust_remote_code")


def faults(tree: ast.AST) -> list[str]:
    """The places of a module by which what a file holds could be executed."""
    places = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            places += [name for name in names if name.split(".")[0] in UNPICKLING]
        elif isinstance(node, ast.Call):
            name, options = (
                ast.unparse(node.func),
                {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords},
            )
            if name == "torch.load" and options.get("weights_only") != "True":
                places.append("torch.load without weights_only=True")
            elif name == "yaml.load" and "SafeLoader" not in ast.unparse(node.args[-1]):
                places.append("yaml.load without a safe loader")
            elif name in CALLS or "True" in map(options.get, OPTIONS) or name.endswith("load_from_checkpoint"):
                places.append(name)
    return places


def test_no_call_lets_a_file_execute() -> None:
    assert {path.name: places for path in SOURCES if (places := faults(ast.parse(path.read_text())))} == {}


def test_such_a_call_would_be_found() -> None:
    for line in (
        *("torch.load(path)", "torch.load(path, weights_only=False)", "import pickle", "from dill import loads"),
        *("yaml.load(text, yaml.Loader)", "os.system(name)", "eval(text)", "np.load(path, allow_pickle=True)"),
    ):
        assert faults(ast.parse(line)), line


def test_the_page_has_a_row_for_each_command() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|", PAGE, re.MULTILINE)
    assert {path.stem for path in (ROOT / "scripts").glob("*.py")} | {"lm.results"} == set(rows)


HOOK = """
import os, sys
place = os.environ.get("WATCHED")
if place:
    file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    def watch(event, args):
        if event == "open" and isinstance(args[0], str) and args[2] & 3:
            os.write(file, f"write {os.path.abspath(args[0])}\\n".encode())
        elif event in ("socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"):
            os.write(file, f"{event}\\n".encode())
        elif event == "os.rename":
            os.write(file, f"write {os.path.abspath(args[1])}\\n".encode())
    sys.addaudithook(watch)
"""


@pytest.mark.slow
def test_commands_write_where_they_say_and_start_and_reach_nothing(script: Script, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 400)
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(tmp_path / "hook"), str(ROOT), os.environ.get("PYTHONPATH", "")])

    def watched(name: str, *words: str) -> set[str]:
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        answer = script(name, *words, env={"WATCHED": str(log), "PYTHONPATH": path, "HF_HUB_OFFLINE": "0"})
        assert answer.returncode == (2 if "http" in words[-1] else 0), answer.stderr
        lines = set(log.read_text().splitlines())
        own = {line.removeprefix(f"write {tmp_path}/") for line in lines}
        return {line.partition("/")[0] for line in own if not line.startswith(("write /dev/", "write /tmp/"))}

    small = [*TINY_RUN, "data.path=text.txt", "data.cache_dir=cache", "run_dir=run"]
    assert watched("train", *small) == {"run", "cache"}
    assert watched("generate", "run_dir=run", "prompt=def", "max_new_tokens=2") == set()
    assert watched("evaluate", "run_dir=run") == set()
    assert watched("export", "run_dir=run", "output_dir=out") == {"out"}
    assert watched("report", "run_dir=run") == {"run"}
    reached = watched("evaluate", "run_dir=run", "data=text", "data.path=http://127.0.0.1:9/text")
    assert "socket.connect" in reached
