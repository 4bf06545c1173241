"""Many processes on one folder, signals, a clock that jumps, little memory, files that change while they are read."""

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from .case import LIMIT, Command, Failed, run
from .prepared import TRAIN, Made, text

HERE = [*TRAIN, "run_dir=run"]


def many(made: Made, rng: random.Random) -> None:
    """Of three in one folder one trains; the others say who does, or show its result. Three more share the cache."""
    for one in [Command([*TRAIN, f"run_dir={name}"]) for name in ("run", "run", "run", "b", "c", "d")]:
        if one.end(3 * LIMIT).proper(0, 2).code == 2 and "is being written by" not in one.err:
            raise Failed(one.err)


def a_signal(made: Made, rng: random.Random) -> None:
    signum = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    one = run(HERE, seconds=rng.uniform(0.3, 1.5), signum=signum)
    if one.code not in (128 + signum, 0) or "Traceback" in one.err:
        raise Failed(f"{signum.name}: exit code {one.code}: {one.err.strip()[-200:]}")


def a_hook(made: Made, rng: random.Random) -> None:
    """A clock that jumps, files that may not grow, a standard stream that is closed or whose reader has left."""
    now, now_ns, size, number = time.time, time.time_ns, rng.randrange(1, 120_000), rng.choice([1, 2])

    def clock() -> None:
        time.time = lambda: now() + rng.uniform(-1e6, 1e6)
        time.time_ns = lambda: now_ns() + rng.randint(-(10**15), 10**15)

    def no_reader() -> None:
        ours, theirs = os.pipe()
        os.dup2(theirs, number)
        os.close(ours)

    limited = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))  # noqa: E731
    hook: Callable[[], object] = rng.choice([clock, no_reader, limited, lambda: os.close(number)])
    run(HERE, hook).proper(0, *[1] * (hook is limited))


def little_memory(made: Made, rng: random.Random) -> None:
    """The C++ allocator may end a process that gets no memory (SIGABRT); what is on the disk is still right."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + rng.randrange(1 << 28)
    one = run(HERE, lambda: resource.setrlimit(resource.RLIMIT_AS, (used, used)))
    if one.code not in (-signal.SIGABRT, -signal.SIGSEGV):
        one.proper()


def a_text_that_changes(made: Made, rng: random.Random) -> None:
    """It is rewritten while it is read: the result is that of one of the two texts, or the command says so."""
    both, path, found = [text(120), text(119)], Path("text.txt"), Path("first/result.json")
    running = Command([*TRAIN, "run_dir=first"])
    for i in range(rng.randrange(1, 60)):
        path.write_text(both[i % 2])
        time.sleep(rng.uniform(0, 0.02))
    hashes = set()
    if running.end().proper(0, 2).code == 0:
        for one in both:
            path.write_text(one)
            run([*TRAIN, f"run_dir={len(one)}", "data.cache_dir=other"]).proper(0)
            hashes.add((Path(str(len(one))) / "model/model.safetensors").read_bytes())
        if (found.parent / "model/model.safetensors").read_bytes() not in hashes:
            raise Failed("silent: a result of neither text")
    path.write_text(both[0])


def a_cache_deleted(made: Made, rng: random.Random) -> None:
    running = Command(HERE)
    time.sleep(rng.uniform(0, 1.0))
    shutil.rmtree("cache", ignore_errors=True)
    running.end().proper()


LIMITS = (many, a_signal, a_hook, little_memory, a_text_that_changes, a_cache_deleted)


def limits(made: Made, case: int, rng: random.Random, seed: int) -> int:
    """Whatever happens, the same command gives the right result afterwards."""
    one = LIMITS[case % len(LIMITS)]
    made.copy("text.txt")
    try:
        one(made, rng)
        made.check("train", run(HERE).proper(0), "afterwards")
    except Failed as error:
        raise Failed(f"{one.__name__}: {error}") from error
    return 1
