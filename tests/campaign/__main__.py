"""python -m tests.campaign [minutes=60] [seed=0] [only=[PART,...]] [case=N] [cases=N] [cores=2]

One table at the end, exit code 1 if anything has failed, nothing left behind. `case` repeats one case of a part,
`cases` tries so many of each part. `cores` cases run at a time.
"""

import sys
import time
from collections.abc import Iterable
from itertools import count, takewhile

from tqdm import tqdm

from .case import Case
from .run import PARTS, prepared, run

NUMBERS = {"minutes": 60, "seed": 0, "case": -1, "cases": 0, "cores": 2}


def table(parts: list[str], cases: list[Case]) -> str:
    rows = ["", "| part | tried | failed | seconds |", "| --- | ---: | ---: | ---: |"]
    for part in parts:
        of = [one for one in cases if one.part == part]
        tried, failed, seconds = (
            sum(one.tried for one in of),
            sum(one.failure != "" for one in of),
            sum(one.seconds for one in of),
        )
        rows.append(f"| {part} | {tried:,} | {failed} | {seconds:,.0f} |")
    return "\n".join([*rows, "", *(f"- {one.failure}" for one in cases if one.failure)])


def main(words: list[str]) -> int:
    given = dict(word.partition("=")[::2] for word in words)
    only = given.pop("only", ",".join(PARTS)).strip("[]").split(",")
    if not (given.keys() <= NUMBERS.keys() and {*only} <= PARTS.keys() and all(map(str.isdecimal, given.values()))):
        print(f"error: {' '.join(words)}: not understood\n{__doc__}\nPART: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    minutes, seed, case, cases, cores = (int(given.get(key, default)) for key, default in NUMBERS.items())
    start, done, code = time.monotonic(), list[Case](), 0
    rounds = ((part, i * PARTS[part][0] + n) for i in count() for part in only for n in range(PARTS[part][0]))
    chosen: Iterable[tuple[str, int]] = takewhile(lambda _: time.monotonic() < start + 60 * minutes, rounds)
    if case >= 0 or cases:
        chosen = [(only[0], case)] if case >= 0 else [(part, n) for n in range(cases) for part in only]
    tqdm.monitor_interval = 0  # no thread before the forks
    with prepared(only), tqdm(total=60 * minutes, unit="s", disable=None) as bar:
        try:
            for one in run((Case(part, number, seed) for part, number in chosen), cores or 1):
                done.append(one)
                bar.update(int(time.monotonic() - start) - bar.n)
                bar.set_description(f"{len(done):,} cases, {sum(one.failure != '' for one in done)} failed")
                if one.failure:
                    tqdm.write(one.failure, sys.stderr)
        except (KeyboardInterrupt, SystemExit) as ended:  # the table counts what was done
            code = 130 if isinstance(ended, KeyboardInterrupt) else int(ended.code or 0)
    print(table(only, done))
    return 1 if any(one.failure for one in done) else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
