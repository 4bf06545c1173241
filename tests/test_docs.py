"""What the README and the pages in docs/ say: commands run, links lead somewhere, figures are those of the program."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

import lm
from lm.cli.main import COMMANDS
from lm.lab import results
from scripts.pages.configuration import PAGE, page
from scripts.pages.notebook import NOTEBOOKS, executed
from tests.helpers import ROOT
from tests.helpers.tiny import TEXT, TINY_RUN

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*/**/*.md")),
    *NOTEBOOKS,
]
QUICK = ["data=text", "tokenizer=byte", "tokenizer.vocab_size=null", "trainer.max_steps=4", "threads=1"]
SMALL = [word for word in TINY_RUN if word.split("=")[0] not in ("data", "trainer")]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text):
    """The lines of bash blocks that start one of our commands, without the comment behind them."""
    lines = "".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    starts = ("python scripts/", "python -m lm ", "lm-lab ")
    return [re.sub(r"\s+#.*", "", line) for line in lines if line.startswith(starts)]


def read(command):
    """The name and the words of a command, whichever way it is started."""
    words = shlex.split(command)
    if words[0] == "lm-lab":
        return words[1], words[2:]
    return (words[3], words[4:]) if words[1] == "-m" else (Path(words[1]).stem, words[2:])


# --- commands


@pytest.fixture
def cwd(finished_run, corpus, monkeypatch):
    """A folder to be in, with a text, a finished run, and the files of questions that the pages show."""
    shutil.copytree(finished_run, corpus.parent / "run")
    for question in [block for path in PAGES for block in blocks(path.read_text(), "yaml")]:
        if name := re.match(r"# (\w+\.yaml)\n", question):
            (corpus.parent / name[1]).write_text(question)
    monkeypatch.chdir(corpus.parent)
    return corpus.parent


def less(name, words):
    """The words of a command for a small run on the text of a test."""
    if words == ["run_dir=RUN"]:
        return ["run_dir=run"]
    places = {"FILE": "corpus.txt", "my.txt": "corpus.txt", "RUN": "run", "DIR": "out"}
    words = [re.sub(r"\b(FILE|my\.txt|RUN|DIR)\d?\b", lambda match: places[match[1]], word) for word in words]
    few = [] if any(word.startswith(("data", "experiment")) for word in words) else ["data.max_bytes=100000"]
    quick = ["experiment=none", "seeds=2", *QUICK[1:]] if "corpus.txt" in words else [*QUICK, "data.path=corpus.txt"]
    return words + {"train": SMALL + few, "ablate": quick, "benchmark": ["only=[limits]", "seconds=0"]}.get(name, [])


@pytest.mark.nightly
@pytest.mark.parametrize("line", dict.fromkeys(line for path in PAGES for line in commands(path.read_text())))
def test_a_command_of_a_page_runs(line, script, cwd):
    name, words = read(line)
    if name == "runs":
        shutil.copytree(cwd / "run", cwd / "runs/run")
    if name == "report" and "output_dir=DIR" in words:
        small = script("ablate", *less("ablate", ["ablation=smoke", "output_dir=DIR"]))
        assert small.returncode == 0, small.stderr
    answer = script(name, *less(name, words))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout


def shown(text):
    """The commands of a text whose output is shown, each with the lines of it."""
    sessions = "".join(block for block in blocks(text, "text") if block.startswith("$ ")).split("$ ")[1:]
    return [(command, lines) for command, *lines in map(str.splitlines, sessions)]


def pattern(line):
    """What a line may be in another run: its numbers are free, and which of two values is better."""
    words = re.sub(r"(?<=[ (])[-+]?\d+(?:[.,]\d+)*(?=[ );,])", "NUMBER", line.replace("[...]", "REST"))
    words = re.escape(words).replace("NUMBER", r"[-+]?[\d.,]+").replace("REST", ".*")
    words = re.sub(
        r"is\\ (?:better|worse)\\ than\\ (\w+)", r"(is (better|worse) than \1|against \1 is undecided)", words
    )
    return re.sub("higher|lower", "(higher|lower)", words)


@pytest.mark.nightly
def test_the_readme_shows_what_its_commands_print(command, tmp_path, monkeypatch):
    """In a few steps: tests/test_published.py has the numbers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text(("ROMEO:\n" + TEXT * 40)[:300_000])
    few = {"train": ["trainer.max_steps=8"], "ablate": ["trainer.max_steps=4", "seeds=2"], "generate": []}
    few = {name: [*words, "validation.every=2"] if words else [] for name, words in few.items()}
    assert {read(line)[0] for line, _ in shown(README)} == few.keys()
    for line, expected in shown(README):
        name, words = read(line)
        words = [word for word in words if not word.startswith("trainer.max_steps")]
        code, out, error = command(name, *words, "threads=1", *few[name])
        assert code == 0, error
        printed = iter((error + out).splitlines())
        if name == "generate":  # what is drawn begins with the prompt
            assert out.startswith(expected[0])
            continue
        for row in expected:
            assert any(re.fullmatch(pattern(row), other) for other in printed), (row, error, out)


@pytest.mark.slow
def test_the_notebook_example_runs(cwd):
    (code,) = (block for block in blocks(README, "python") if "load_model" in block)
    names = {}
    exec(code.replace("runs/...", "run"), names)
    assert names["logits"].shape == (*names["tokens"].shape, 257)


# --- pages


@cache
def anchors(path):
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_relative_link_leads_to_a_file_and_a_heading_and_every_path_is_there():
    for source in LINKING:
        paths = re.findall(r"`((?:lm|configs|tests|scripts|docs)/[\w./]+)`", source.read_text())
        assert [path for path in paths if not (ROOT / path).exists()] == [], source
        text = re.sub(r"```.*?```|`[^`\n]*`", "", source.read_text(), flags=re.DOTALL)
        links = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|href)="([^"]+)"', text)]
        for link in (link for link in links if not re.match(r"[a-z]+:", link)):
            path, _, anchor = link.partition("#")
            target = source.parent / path if path else source
            assert target.exists(), (source, link)
            assert not anchor or target.suffix != ".md" or anchor in anchors(target), (source, link)


def test_the_page_of_settings_is_what_the_dataclasses_say(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)  # the default of data.cache_dir depends on it
    text = PAGE.read_text()
    assert text == page(), "run: python -m scripts.pages.configuration"
    assert [name for name in COMMANDS if f"\n## {name}\n" not in text] == []
    assert [line for line in text.splitlines() if line.endswith("|  |")] == []  # each setting says what it is


def test_the_version_is_the_same_in_all_three_files():
    """docs/release.md names them. pyproject.toml reads the version of lm/__init__.py."""
    (heading, date) = re.findall(r"^## \[(\S+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert heading == citation["version"] == lm.__version__
    assert date == str(citation["date-released"])
    assert '[tool.hatch.version]\npath = "lm/__init__.py"' in (ROOT / "pyproject.toml").read_text()


# --- pages to work through: the notebooks and own-variant.md


def kinds(cells):
    """The kinds of the outputs of each cell."""
    return [[output["output_type"] for output in cell.get("outputs", ())] for cell in cells]


@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    """Its own assertions check what it says. Figures differ between machines, and are not compared."""
    cells = executed(path, tmp_path).cells
    assert kinds(cells) == kinds(json.loads(path.read_text())["cells"])
    outputs = [cell.get("outputs") for cell in cells]
    assert re.search(r"\b(better|worse|equivalent|undecided)\b", json.dumps(outputs))


BLOCK = re.compile(r"^```(python|yaml|text)\n(?:# ([\w./]+)\n)?(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.nightly
def test_a_class_gets_a_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    programs = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": programs}
    for language, name, content in BLOCK.findall((ROOT / "docs/own-variant.md").read_text()):
        if name:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(content)
        elif language == "python":
            exec(content, {})
        else:
            subprocess.run(["bash", "-ec", content], env=env, check=True, capture_output=True)
    assert capsys.readouterr().out.split()[0] in ("better", "worse", "equivalent", "undecided")
    runs = results.runs(tmp_path / "ablations/reglu", settings=["model.ffn"])
    sizes = runs.groupby(["arm", "model.ffn"]).size().to_dict()
    assert sizes == {("reglu", "mine.ReGLU"): 3, ("swiglu", "swiglu"): 3}
    assert runs["n_params"].nunique() == 1
