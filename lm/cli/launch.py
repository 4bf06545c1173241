"""From a command line to a dataclass, by way of Hydra, and out with an exit code."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Generic, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lm.cli import program, words
from lm.cli.base import with_base
from lm.cli.compose import Config, convert, register
from lm.cli.errors import CONFIGS, before_the_task, complain, report
from lm.cli.help import offer_help
from lm.cli.names import names
from lm.config import BadInput
from lm.system.streams import ReaderLeft, protect
from lm.system.terminal import is_first_process, printable

STOPPING = (signal.SIGTERM, signal.SIGHUP)


def launch(
    task: Callable[[Config], int | None],
    schema: type[Config],
    name: str,
    line: list[str] | None = None,
    *,
    verbatim: tuple[str, ...] = (),
    rest: str | None = None,
    resumable: bool = False,
    at_end: Callable[[], object] = lambda: None,
) -> NoReturn:
    """Compose configs/NAME.yaml with a command line, convert it to `schema`, call `task`, leave with an exit code.

    0 done, or what the task returns; 1 our own fault; 2 bad input; 129, 130 and 143 interrupted. `line` is the words
    after the command's name (sys.argv's if None). The value of a key in `verbatim` is taken as it stands, past Hydra's
    grammar. Words that set no key of the schema go, as they are, to the list named by `rest`. A command that is
    `resumable` leaves its results in files, so it needs no reader of its output, and prints what to type when it is
    interrupted. With -m the task is called once for each job, then `at_end`.
    """
    line, again = sys.argv[1:] if line is None else line, program.typed()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us as they are
    for signum in STOPPING:
        if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup starts a command
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
    speak(output_is_the_result=not resumable)
    if strange := words.not_utf8(line):
        sys.exit(complain(strange, 2))
    repair_argparse()
    taken: dict[str, Any] = {}
    if not words.has(line, words.COMPLETION):
        found, line = words.take_verbatim(line, verbatim)
        taken |= found
        if rest:
            if words.has(line, words.SWEEP):
                sys.exit(complain("-m: an ablation is a sweep already; list its values as arms and seeds", 2))
            others, line = words.take_others(line, names(schema))
            taken[rest] = [words.quoted(word) for word in others]
    if words.has(line, words.SWEEP) and (folder := words.fixed_run_dir(line)):
        sys.exit(complain(f"run_dir={folder}: a sweep needs a directory for each run; leave run_dir out", 2))
    register(name, schema)
    offer_help(task)
    jobs = Jobs(task, schema, taken)
    try:
        sys.argv = [sys.argv[0], *words.prepared(line)]  # Hydra reads it there
        try:
            hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(jobs)()
            at_end()
        finally:
            sys.stdout.flush()  # also what --help prints: an error at the exit of Python would have no handler
    except JobFailed as error:
        sys.exit(complain(f"a job of the sweep failed: {error}", error.code))
    except ReaderLeft as error:
        sys.exit(report(error))
    except Exception as error:
        sys.exit(report(error) if jobs.started else complain(before_the_task(error, line, schema, verbatim), 2))
    except BaseException as error:
        if (code := interrupted(error)) is None:
            raise
        if is_first_process():
            said = str(error) if hasattr(error, "signum") else "interrupted"
            print(f"{said}; resume with: {again}" if resumable else said, file=sys.stderr)
        sys.exit(code)
    sys.exit(min(map(report, jobs.failed), default=jobs.code))


class JobFailed(Exception):
    """A job of a sweep failed in another process, under one of Hydra's launchers."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class Jobs(Generic[Config]):
    """The task as Hydra calls it: once, or with -m once for each combination of values. A failed job stops no other."""

    def __init__(self, task: Callable[[Config], int | None], schema: type[Config], taken: dict[str, Any]) -> None:
        self.task, self.schema, self.taken = task, schema, taken
        self.argv, self.process = sys.argv, os.getpid()
        self.started, self.code = False, 0
        self.failed: list[Exception] = []

    def __call__(self, composed: DictConfig) -> None:
        sys.argv = self.argv  # as typed: Lightning starts the further processes of a run by it
        self.started = True
        if os.getpid() != self.process:
            speak(output_is_the_result=False)
        try:
            composed = with_base(composed, list(HydraConfig.get().overrides.task))
            self.code = max(self.code, self.task(convert(composed, self.schema, self.taken)) or 0)
        except Exception as error:
            if os.getpid() != self.process:  # what is noted here would be lost, but an exception is handed over
                message = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
                raise JobFailed(message, report(error)) from None
            self.failed.append(error)


def interrupted(error: BaseException) -> int | None:
    """The exit code after Ctrl-C, SIGTERM or SIGHUP, also where training has saved first; None for anything else."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit):
        return error.code if error.code in [128 + signum for signum in STOPPING] else None
    signum = getattr(error, "signum", None)
    return None if signum is None else 128 + int(signum)


class Visible(logging.Formatter):
    """Messages may hold names from outside, which must not steer a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def speak(output_is_the_result: bool) -> None:
    """Our own messages go to standard error."""
    protect(output_is_the_result)
    handler = logging.StreamHandler()
    handler.setFormatter(Visible("%(message)s"))
    ours = logging.getLogger("lm")
    ours.handlers[:] = [handler]
    ours.setLevel(logging.INFO if is_first_process() else logging.WARNING)


def repair_argparse() -> None:
    """One line for an unknown flag. And let Hydra 1.3 start on Python 3.14, whose argparse checks help texts that Hydra
    gives as lazy objects."""

    def refuse(self: argparse.ArgumentParser, message: str) -> NoReturn:
        hint = "; a setting is given as key=value, and --cfg job shows them" if "unrecognized" in message else ""
        sys.exit(complain(f"{message}{hint}", 2))

    argparse.ArgumentParser.error = refuse  # type: ignore[method-assign]
    check = getattr(argparse.ArgumentParser, "_check_help", None)
    if check is None:
        return

    def check_text(self: argparse.ArgumentParser, action: argparse.Action) -> None:
        if action.help is None or isinstance(action.help, str):
            check(self, action)

    argparse.ArgumentParser._check_help = check_text  # type: ignore[attr-defined]
