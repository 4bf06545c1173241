"""python -m tests.faults [minutes=60] [seed=0] [case=N]

Disturbs one command after the other until the time is over. Prints a table of what was tried; exit code 1 if anything
has failed. `case` repeats one case.
"""

import sys
import time
from collections import Counter
from itertools import count, takewhile

from .case import FAULTS, Case
from .commands import COMMANDS, prepared


def table(cases: list[Case]) -> str:
    tried = Counter((case.name, case.fault) for case in cases if case.happened)
    failed = Counter(case.name for case in cases if case.defect)
    rows = [["command", *FAULTS, "failed"], ["---", *["---:"] * (len(FAULTS) + 1)]]
    rows += [[name, *[str(tried[name, fault]) for fault in FAULTS], str(failed[name])] for name in COMMANDS]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(words: list[str]) -> int:
    given = dict(word.partition("=")[::2] for word in words)
    options = {"minutes": 60, "seed": 0, "case": -1}
    if not (given.keys() <= options.keys() and all(map(str.isdecimal, given.values()))):
        print(f"error: {' '.join(words)}: not understood\n{__doc__}", file=sys.stderr)
        return 2
    minutes, seed, case = (options | {key: int(value) for key, value in given.items()}).values()
    cases: list[Case] = []
    with prepared(COMMANDS) as (fixtures, undisturbed):
        end = time.monotonic() + 60 * minutes
        numbers = takewhile(lambda _: time.monotonic() < end, count()) if case < 0 else [case]
        try:
            for number in numbers:
                cases.append(Case(number, seed).run(fixtures, undisturbed))
                if cases[-1].defect:
                    print(cases[-1].defect, file=sys.stderr, flush=True)
        except KeyboardInterrupt:  # the table counts what was done
            print("interrupted", file=sys.stderr)
    print(table(cases))
    return int(any(case.defect for case in cases))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
