"""The benchmark measures what it says: candidates alternate, and ratios are within rounds."""

import json

import pytest

from scripts.benchmark.measure import alternate, compare, median_ratio
from scripts.benchmark.run import SECTIONS


def test_candidates_alternate_and_a_ratio_is_taken_within_a_round():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "ab"}
    times = alternate(calls, 0.0, at_least=3)
    assert called == ["a", "a", "b", "b", *["a", "b"] * 3]  # two warm-up calls of each
    assert [len(column) for column in times.values()] == [3, 3]
    assert [name for name, *_ in compare(calls, 0.0)] == ["b"]
    assert median_ratio([1.0, 10.0, 1.0, 10.0, 1.0], [2.0, 20.0, 2.0, 20.0, 2.0]) == 0.5  # a slow machine for a while


@pytest.mark.nightly
def test_the_script_measures_every_section_prints_a_table_and_writes_json(script, tmp_path):
    answer = script("benchmark", "seconds=0", "output=out.json", "threads=2")
    assert answer.returncode == 0, answer.stderr
    for word in ("transformers", "without", "datasets.map", "memory bandwidth", "idle"):
        assert word in answer.stdout
    rows = json.loads((tmp_path / "out.json").read_text())["measurements"]
    assert {row["section"] for row in rows} == {*SECTIONS}
    assert min(row["value"] for row in rows if row["section"] == "limits") > 0
