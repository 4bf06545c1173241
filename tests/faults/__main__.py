"""python -m tests.faults [minutes=60] [seed=0] [commands=NAME,NAME] [case=N,N]

Disturbs one command after the other until the time is over. Prints a table of what was tried; exit code 1 if anything
has failed. `case` repeats these cases alone.
"""

import sys
import time
from collections import Counter
from itertools import count, takewhile

from .campaign import COMMANDS, FAULTS, Case, prepared


def table(cases: list[Case]) -> str:
    tried = Counter((case.name, case.fault) for case in cases if case.happened)
    failed = Counter(case.name for case in cases if case.defect)
    rows = [["command", *FAULTS, "failed"], ["---", *["---:"] * (len(FAULTS) + 1)]]
    rows += [[name, *[str(tried[name, fault]) for fault in FAULTS], str(failed[name])] for name in COMMANDS]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(minutes: str = "60", seed: str = "0", commands: str = ",".join(COMMANDS), case: str = "") -> int:
    names, cases = tuple(commands.split(",")), list[Case]()
    with prepared(names) as (fixtures, undisturbed):
        end = time.monotonic() + 60 * float(minutes)
        for number in map(int, case.split(",")) if case else takewhile(lambda _: time.monotonic() < end, count()):
            cases.append(Case(number, int(seed), names).run(fixtures, undisturbed))
            if cases[-1].defect:
                print(cases[-1].defect, file=sys.stderr, flush=True)
    print(table(cases))
    return int(any(case.defect for case in cases))


if __name__ == "__main__":
    sys.exit(main(**dict(word.split("=") for word in sys.argv[1:])))
