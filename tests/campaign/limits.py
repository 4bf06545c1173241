"""Many processes on one folder, signals, a clock that jumps, little memory, files that change while they are read."""

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from .case import ABLATE, HERE, SECONDS, TRAIN, Case, check, copy, text
from .program import LIMIT, Command, Failed, run

WEIGHTS = "model/model.safetensors"


def many(case: Case) -> None:
    """Of three in one folder one trains; the others say who does, or show its result. Three more share the cache."""
    names = ["run", "run", "run", "b", "c", "d"]
    all_of_them = [Command([*HERE, f"run_dir={name}"], limit=3 * LIMIT) for name in names]
    refused = [name for name, one in zip(names, all_of_them, strict=True) if one.end().proper(0, 2).code]
    said = sum("is being written by" in one.err for one in all_of_them)
    if refused not in ([], ["run"], ["run", "run"]) or said < len(refused):
        raise Failed(f"{refused} are refused")
    if len({Path(name, WEIGHTS).read_bytes() for name in names}) > 1:
        raise Failed("silent: equal settings, other weights")


def a_signal(case: Case) -> None:
    signum = case.rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    one = Command(HERE).end(signum, case.rng.uniform(0.3, 1.5))
    case.tried = int(one.code != 0)
    if one.code not in (128 + signum, 0) or "Traceback" in one.err:
        raise Failed(f"{signum.name}: exit code {one.code}: {one.err.strip()[-200:]}")


def ctrl_c(case: Case) -> None:
    """It reaches all processes of an ablation, as a terminal sends it."""
    driver = Command(ABLATE, os.setpgrp, 5 * LIMIT)
    time.sleep(case.rng.uniform(0.5, SECONDS["ablate"]))
    os.killpg(driver.pid, signal.SIGINT)
    if driver.end().code not in (128 + signal.SIGINT, 0) or "Traceback" in driver.err:
        raise Failed(f"exit code {driver.code}: {driver.err.strip()[-400:]}")
    case.tried = int(driver.code != 0)
    run(ABLATE, limit=5 * LIMIT).proper(0)


def a_clock_that_jumps(case: Case) -> None:
    def hook() -> None:
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() + case.rng.uniform(-1e6, 1e6)
        time.time_ns = lambda: now_ns() + case.rng.randint(-(10**15), 10**15)

    run(HERE, hook).proper(0)


def files_that_may_not_grow(case: Case) -> None:
    size = case.rng.randrange(1, 85_000)  # the largest has 85,169 bytes
    run(HERE, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))).proper(0, 1)


def a_full_disk(case: Case) -> None:
    """The run is on a file system of a few kilobytes, which then grows. Only root may mount one."""
    os.mkdir("run")
    size = f"size={4 * case.rng.randint(1, 99)}k"
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", "run"], capture_output=True).returncode
    ):
        case.tried = 0
        return
    try:
        run(HERE).proper(0, 1)
        subprocess.run(["mount", "-o", "remount,size=64m", "run"], check=True)
        check("train", run(HERE).proper(0))
    finally:
        subprocess.run(["umount", "--lazy", "run"], check=True)


def a_stream_that_nobody_reads(case: Case) -> None:
    """It is closed, or its reader has left."""
    number, closed = case.rng.choice([1, 2]), case.rng.random() < 0.5

    def hook() -> None:
        ours, theirs = os.pipe()
        os.dup2(theirs, number)
        os.close(ours)

    run(HERE, (lambda: os.close(number)) if closed else hook).proper(0)


def little_memory(case: Case) -> None:
    """A library in C++ may end a process that gets no memory (SIGABRT, SIGSEGV); what is on the disk is right."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + case.rng.randrange(1 << 28)
    one = run(HERE, lambda: resource.setrlimit(resource.RLIMIT_AS, (used, used)))
    if one.code not in (-signal.SIGABRT, -signal.SIGSEGV):
        one.proper()


def a_text_that_changes(case: Case) -> None:
    """It is rewritten while it is read: the result is that of one of the two texts, or the command says so."""
    both, path, right = [text(120), text(119)], Path("text.txt"), set()
    running = Command([*TRAIN, "run_dir=first"])
    for i in range(case.rng.randrange(1, 60)):
        path.write_text(both[i % 2])
        time.sleep(case.rng.uniform(0, 0.02))
    if running.end().proper(0, 2).code == 0:
        for i, one in enumerate(both):
            path.write_text(one)
            run([*TRAIN, f"run_dir={i}", "data.cache_dir=other"]).proper(0)
            right.add(Path(str(i), WEIGHTS).read_bytes())
        if Path("first", WEIGHTS).read_bytes() not in right:
            raise Failed("silent: a result of neither text")
    path.write_text(both[0])


def a_cache_deleted(case: Case) -> None:
    running = Command(HERE)
    time.sleep(case.rng.uniform(0, 1.0))
    shutil.rmtree("cache", ignore_errors=True)
    running.end().proper()


LIMITS: list[Callable[[Case], None]] = [many, a_signal, ctrl_c, a_clock_that_jumps, a_full_disk, little_memory]
LIMITS += [files_that_may_not_grow, a_stream_that_nobody_reads, a_text_that_changes, a_cache_deleted]


def limits(case: Case) -> None:
    """Whatever happens, the same command gives the right result afterwards."""
    one = LIMITS[case.number % len(LIMITS)]
    case.about = one.__name__
    copy("text.txt")
    one(case)
    check("train", run(HERE).proper(0))
