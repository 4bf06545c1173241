"""How torch's threads wait for each other: in a loop on an idle machine, asleep while other programs need the cores.

GNU's OpenMP runtime, with which torch is built on Linux, lets a thread that waits spin for several milliseconds. That
is fastest as long as each thread has a core of its own. Where a thread shares its core with another program, the others
spin through its turns, and a training step takes many times as long. The runtime spins for microseconds only while it
has more threads than there are cores (see GOMP_SPINCOUNT in its manual), and idle threads count. Hence idle threads are
added while other programs are busy. The threads that compute, and therefore all bits of a result, stay the same.
"""

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lm.system.device import cores

PERIOD = 0.25  # seconds between two readings of the load
ABOVE, BELOW = 0.25, 0.1  # cores too few for all: threads that wait sleep above the first, and spin below the second
SET_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
STAT = Path("/proc/stat")


@contextmanager
def adaptive_waiting(threads: int) -> Iterator[None]:
    """A context in which waiting threads sleep while the cores are too few for `threads` and for other programs.

    It does nothing for one thread, on systems other than Linux, and where the user has set one of SET_BY_USER.
    """
    if threads < 2 or not STAT.exists() or any(name in os.environ for name in SET_BY_USER):
        yield
        return
    ended = threading.Event()
    watch = threading.Thread(target=keep_watch, args=(threads, ended), daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def keep_watch(threads: int, ended: threading.Event) -> None:
    others = OtherPrograms()
    idle: IdleThreads | None = None
    while not ended.wait(PERIOD):
        missing = threads + others.cores_used() - cores()
        if idle is None and missing > ABOVE:
            idle = IdleThreads(threads)
        elif idle is not None and missing < BELOW:
            idle.end()
            idle = None
    if idle is not None:
        idle.end()


class IdleThreads:
    """Idle threads of the OpenMP runtime, so many that with `threads` that compute they outnumber the cores."""

    def __init__(self, threads: int) -> None:
        teams = max(0, cores() - threads) // (threads - 1) + 1
        self.ended = threading.Event()
        self.hosts = [threading.Thread(target=self.host, args=(threads,), daemon=True) for _ in range(teams)]
        for host in self.hosts:
            host.start()

    def host(self, threads: int) -> None:
        """The runtime keeps a team for each thread that has once used several, as long as that thread lives."""
        torch.zeros(threads << 16).add_(1)  # so many that torch adds in parallel
        self.ended.wait()

    def end(self) -> None:
        self.ended.set()
        for host in self.hosts:
            host.join()


class OtherPrograms:
    """What other programs use of the cores that this process may use."""

    def __init__(self) -> None:
        self.before = self.seconds()

    def cores_used(self) -> float:
        """The mean number since the last call."""
        (then, used_then), (now, used) = self.before, self.seconds()
        self.before = now, used
        return (used - used_then) / (now - then)

    @staticmethod
    def seconds() -> tuple[float, float]:
        """The time, and the CPU time of other programs up to now."""
        allowed = {f"cpu{n}" for n in os.sched_getaffinity(0)}
        rows = [line.split() for line in STAT.read_text().splitlines()]
        ticks = sum(sum(map(int, row[1:4])) + sum(map(int, row[6:8])) for row in rows if row[0] in allowed)
        own = resource.getrusage(resource.RUSAGE_SELF)  # user nice system (idle iowait) irq softirq
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") - own.ru_utime - own.ru_stime
