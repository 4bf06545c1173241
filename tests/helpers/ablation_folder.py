"""Folders of runs and ablations made by hand, whole, broken or on the way, and a report as its readers see it."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml
from conftest import WHOLE_RESULT

from lm.config import REQUESTED, RunConfig, flat
from lm.lab.ablation.report import write_report
from lm.lab.ablation.results import read_results
from lm.lab.ablation.tuning import LADDER, factor
from lm.system.code import code_identity
from lm.system.files import read_csv

ARMS = {"tied": 3.50, "untied": 3.53, "untied_matched": 3.502, "tied_naive": 4.4}  # and what they come to
METRICS = ("step", "tokens", "lr", "train/loss", "train/grad_norm", "val/loss", "val/bpb", "val/top1", "val/tokens")
SIZES = {"n_params": 1_017_472, "flops_per_token": 6_000_000, "tokens_per_step": 1024, "seconds_per_step": 0.09}
SIZES |= {"vocab_size": 2048, "scored_tokens": [89_999], "steps": 1000}
WHOLE = 89_999  # tokens of the validation text that are scored


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def lines(*rows: Any) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def write_run_dir(path: Path, run: RunConfig, result: dict[str, Any] | None = None, **hashes: str) -> None:
    """A run that is no ablation's, with a curve of three points, and a result if it is finished."""
    hashes = dict.fromkeys(("data_hash", "tokenizer_hash", "config_hash"), "x") | hashes
    run = replace(run, trainer=replace(run.trainer, max_steps=40))
    begun = {"requested": {key: flat(asdict(run))[key] for key in REQUESTED}, "code": code_identity()}
    write(path / "config.yaml", yaml.safe_dump(asdict(run) | begun | hashes))
    loss = (result or {}).get("val_loss", 3.5)
    rows = [(step, 128 * step, loss + 1 / step) for step in (10, 20, 30)]
    write(path / "metrics.csv", lines(("step", "tokens", "val/loss"), *rows))
    if result:
        write(path / "result.json", WHOLE_RESULT | result)


def write_run(path: Path, arm: str, seed: int, loss: float, steps: int) -> None:
    chance = random.Random(f"{arm} {seed} {steps}")
    result = WHOLE_RESULT | {"val_loss": loss, "val_bpb": loss / 2.23, "val_top1": 0.42 - loss / 30, "seed": seed}
    result |= {"steps": steps, "tokens": steps * 1024, "seconds": 0.09 * steps * chance.uniform(0.95, 1.05)}
    result["resumed_from"] = [40] if seed == 1 else []
    write(path / "result.json", result)
    metrics = []
    for step in range(100, steps + 1, 100):
        now = loss + 4 * math.exp(-5 * step / steps) + chance.gauss(0, 0.01)
        metrics.append([step, step * 1024, 0.001, now - 0.1, 1.2, now, now / 2.23, 0.42 - now / 30, WHOLE])
    write(path / "metrics.csv", lines(METRICS, *metrics))


def write_reported(path: Path, arm: str, seed: int, steps: int, broken: bool) -> None:
    chance = random.Random(f"{arm} {seed} {steps}")
    loss = ARMS[arm] + 0.01 * seed + chance.gauss(0, 0.002) + (1000 - steps) / 4000
    outcome = path.with_name(path.name + ".json")
    if broken and (arm, seed) == ("tied_naive", 2):
        write(outcome, {"status": "diverged", "error": "the loss is nan at step 7"})
    elif broken and (arm, seed) == ("tied_naive", 1):
        write(outcome, {"status": "failed", "error": "RuntimeError: a | <b>crack</b>"})
    elif broken and (arm, seed) == ("untied_matched", 2):
        write(path / "metrics.csv", lines(("step", "tokens"), (70, 71680)))
    else:
        write_run(path, arm, seed, loss, steps)


def make(
    path: Path,
    done: Callable[[str, int], bool] = lambda arm, seed: True,
    seeds: tuple[int, ...] = (0, 1, 2),
    tuned: bool = False,
    broken: bool = False,
    report: bool = True,
    **changes: Any,
) -> Path:
    """An ablation's folder: four arms of equal tokens; if tuned, the best value of each is its configuration's."""
    factors = [factor(rung) for rung in LADDER] if tuned else [1.0]
    runs = list[dict[str, Any]]()
    for arm in ARMS:
        for seed in seeds:
            for by in factors:
                name = f"runs/{arm}-seed{seed}-{1000 * by:.0f}"
                runs.append({"arm": arm, "seed": seed, "factor": by, "run_dir": name})
                if done(arm, seed):
                    write_reported(path / name, arm, seed, 1000, broken)
                for result in path.glob(f"{name}/result.json"):
                    content = json.loads(result.read_text())
                    write(result, content | {"val_loss": content["val_loss"] + 0.1 * math.log2(by) ** 2})
    arms = {
        arm: {
            "overrides": [f"head={arm.partition('_')[0]}", *["model.n_layers=3"] * (arm == "untied_matched")],
            "matched": {"model.d_ff": 200} if arm == "untied_matched" else {},
            "is_tuned": tuned,
            "identity": {"data_hash": "d" * 64, "tokenizer_hash": "t" * 64, "source_hash": "s" * 64},
            "settings": {"head.untie_at": i / 4, "validation.every": 100},
        }
        | SIZES
        for i, arm in enumerate(ARMS)
    }
    question: dict[str, Any] = {"name": "tying", "question": "Should a small model tie its LM head?"}
    question |= {"arms": {arm: arms[arm]["overrides"] for arm in ARMS}, "baseline": "tied", "seeds": [*seeds]}
    question |= {"equivalence_margin": 0.01, "primary": [*ARMS][1:3], "folds": False, "tune": "true" if tuned else None}
    question |= {"match_parameters": {"untied_matched": "model.d_ff"}, "overrides": ["trainer.max_steps=1000"]}
    content: dict[str, Any] = {"question": question | changes, "arms": arms, "runs": runs}
    content |= {"begun": "2026-01-31 12:00+00:00", "machine": "Linux x86_64, 0 GPUs"}
    content |= {"command": "python scripts/ablate.py ablation=tying 'a=``x``'"}
    write(path / "ablation.json", content)
    if report:
        write_report(read_results(path))
    return path


def numbers(path: Path) -> dict[str, Any]:
    """report.json, which must be JSON in the strict sense."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return dict(json.loads((path / "report.json").read_text(), parse_constant=refuse))


def results(path: Path) -> list[dict[str, str]]:
    return read_csv(path / "results.csv")


def change_results(path: Path, pattern: str, **changes: Any) -> None:
    for place in path.glob(f"runs/{pattern}/result.json"):
        write(place, json.loads(place.read_text()) | changes)


class Page(HTMLParser):
    """A page as its reader sees it: words without those of the figures, tables, headings; and its tags."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.meta: dict[str, str] = {}
        self.headings: list[str] = []
        self.tables: list[list[list[str]]] = []
        self._words: list[str] = []
        self._open: list[str] = []
        self.feed((path / "report.html" if path.is_dir() else path).read_text())
        self.text = " ".join("".join(self._words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open += [] if tag in ("meta", "path", "use", "rect") else [tag]
        self.addresses += [str(value) for key, value in attrs if key in ("src", "href", "xlink:href")]
        if tag == "meta":
            self.meta |= {str(dict(attrs).get("http-equiv")): str(dict(attrs).get("content"))}
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag in ("h1", "h2", "h3"):
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if {"svg", "style", "title"} & {*self._open}:
            return
        self._words.append(data)
        if {"td", "th"} & {*self._open}:
            self.tables[-1][-1][-1] += data
        elif {"h1", "h2", "h3"} & {*self._open}:
            self.headings[-1] += data
