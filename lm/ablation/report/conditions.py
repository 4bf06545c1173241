"""What the runs were made with: devices, threads and versions, as their own results say; and pairs that mix them."""

from collections import Counter
from collections.abc import Iterator, Sequence

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.study import Row, Study
from lm.ablation.record import Caution

UNKNOWN = "unknown"
CONDITIONS = {"device": "device", "cpu": "CPU", "threads": "threads", "precision": "precision", "python": "Python"}


def conditions(row: Row) -> dict[str, str]:
    """By name."""
    found = {name: str(row.result[key]) for key, name in CONDITIONS.items()}
    return found | {"torch": str(row.result["versions"]["torch"])}


def mixed(study: Study, contrasts: Sequence[Contrast]) -> Iterator[Caution]:
    """Pairs whose two runs were made under different conditions, and conditions that differ from pair to pair."""
    pairs: dict[str, list[int]] = {}
    named: set[str] = set()
    for one in {each.runs: each for each in contrasts}.values():
        runs = [study.finished(arm, one.budget) for arm in (one.arm, one.baseline)]
        for seed in one.seeds:
            ours, theirs = (conditions(each[seed]) for each in runs)
            known = [key for key in ours if UNKNOWN not in (ours[key], theirs[key])]
            if differing := [key for key in known if ours[key] != theirs[key]]:
                named |= {*differing}
                values = ", ".join(f"{key} {ours[key]} and {theirs[key]}" for key in differing)
                pairs.setdefault(f"{one.arm} and {one.baseline}, {values}", []).append(seed)
    if pairs:
        said = "; ".join(f"{who}, seed {', '.join(map(str, seeds))}" for who, seeds in pairs.items())
        yield Caution(
            f"Two runs of a pair were made under different conditions: {said}.",
            "Their difference is partly one of these conditions. Remove such runs, then call ablate to repeat them.",
        )
    others = {key: counts for key, counts in tallies(study).items() if key not in named and len(counts) > 1}
    if said := "; ".join(f"{key} {', '.join(counts)}" for key, counts in others.items()):
        meaning = "Both runs of each pair were made under the same, so only the spread over seeds can be affected."
        yield Caution(f"Conditions differ between seeds: {said}.", meaning)


def tallies(study: Study) -> dict[str, Counter[str]]:
    """By condition, how many finished reported runs have each value that is known."""
    found: dict[str, Counter[str]] = {}
    for row in study.rows:
        for key, value in conditions(row).items() if row.result else ():
            found.setdefault(key, Counter()).update([value] * (value != UNKNOWN))
    return found


def made_with(study: Study) -> list[list[str]]:
    """A row for each condition of the finished reported runs; those of several values with their numbers of runs."""
    n, rows = sum(bool(row.result) for row in study.rows), []
    for key, counts in tallies(study).items():
        known = Counter(counts)
        if lacking := n - known.total():
            known[UNKNOWN] = lacking
        values = [value if len(known) == 1 else f"{value} ({runs} of {n} runs)" for value, runs in known.items()]
        rows.append([f"{key} of the runs", ", ".join(values)])
    packages: dict[str, dict[str, None]] = {}
    for row in study.rows:
        for name, version in row.result.get("versions", {}).items():
            packages.setdefault(name, {})[version] = None
    if others := [f"{name} {' and '.join(versions)}" for name, versions in packages.items() if name != "torch"]:
        rows.append(["other packages of the runs", ", ".join(others)])
    return rows or [["made with", "no run is finished yet"]]
