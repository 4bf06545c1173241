"""The console command: lm-lab COMMAND [group=choice] [key=value ...]

This is the one place where exceptions end. Exit codes: 0 done; 1 a fault of the program, no memory or disk space, or
failed runs of an ablation; 2 bad input; 129, 130 and 143 interrupted by SIGHUP, SIGINT and SIGTERM. LM_DEBUG=1 in the
environment shows the traceback of every error.
"""

import errno
import functools
import gc
import io
import logging
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import lm
from lm.cli import COMMANDS, NAME, started_by, this_command
from lm.config import UserError
from lm.config.checks import RESUMABLE, without_secrets
from lm.system.terminal import MessageHandler, close_bars, is_first_process, is_impatient, printable

ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
INTERRUPTED = tuple(128 + signum for signum in ENDING)
DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
# Errors of the machine: no other path or permission mends them.
MACHINE = (*DISK_FULL, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOLCK, errno.EOPNOTSUPP)
failed_jobs: list[int] = []  # exit codes, of a sweep
signals: list[int] = []  # those that have arrived
arrivals: list[float] = []  # of these, by the monotonic clock


def main(command: str | None = None) -> NoReturn:
    """Run a command, by default the one that the first argument names, and leave with its exit code."""
    configure_streams()
    for signum in ENDING:
        if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup starts a command
            signal.signal(signum, _on_signal)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # its errors come to us as they are
    try:
        code = _run(command, sys.argv[1:])
        print(end="", flush=True)  # what cannot be written fails before Python exits
    except Exception as error:
        code = handle_exception(error)
    except BaseException as error:
        code = _interruption(error)
    for signum in ENDING if signals else ():  # a second one must not change the exit code while Python ends
        signal.signal(signum, signal.SIG_IGN)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # Python would try again when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(max(code, *failed_jobs, 0))


def _on_signal(signum: int, _: Any) -> None:
    signals.append(signum)
    arrivals.append(time.monotonic())
    if len(arrivals) > 1 and not is_impatient(signum, arrivals[-1] - arrivals[0]):
        return  # what the first one has begun, such as to let runs save their checkpoints, goes on
    raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)


def _run(command: str | None, args: list[str]) -> int:
    is_completion = args[:1] == ["-sc"]
    if command is None and is_completion:  # Hydra knows of no commands: they are taken off the line
        program, _, words = os.environ.get("COMP_LINE", "").partition(" ")
        command, space, words = words.partition(" ")
        os.environ["COMP_LINE"] = f"{program} {words}"
        if program and not space:
            print(*COMMANDS)
            return 0
        command = command or "train"  # the installation is the same for all
        if command not in COMMANDS:
            return 0
    if command is None:
        if not args or args[0] in ("-h", "--help", "help"):
            listed = "\n".join(f"  {name:10} {summary}" for name, summary in COMMANDS.items())
            start = shlex.join(started_by())
            print(f"usage: {start} COMMAND [group=choice] [key=value ...]\n\n{listed}\n")
            print(f"{start} COMMAND --help lists the groups and settings of a command.")
            return 0
        command, *args = args
    if "--version" in (command, *args):
        print(f"{NAME} {lm.__version__}")
        return 0
    if command not in COMMANDS:
        from lm.cli.words import no_such_command

        raise UserError(no_such_command(command, args))
    for arg in args:
        if re.search("[\ud800-\udfff]", arg):
            raise UserError(f"{arg}: not UTF-8; rename the file, or set PYTHONUTF8=1 where the locale is another")
    if command != "train":  # whose configuration says how many processes there are
        configure_streams(world_size=1)
    module = import_module(f"lm.cli.{command}")
    if {"-h", "--help"} & {*args}:
        from lm.cli.help import help_text

        print(help_text(command, str(module.__doc__), module.SCHEMA, args))
    elif is_completion and command not in ("train", "ablate"):
        print(*(f"{key}=" for key in module.SCHEMA.__slots__))
    else:
        return int(module.run(args) or 0)
    return 0


# --- where exceptions end


def handle_exception(error: Exception, job: str = "") -> int:
    """Print an error, in one line where the user can correct it, and return the exit code."""
    if signals:  # an import that a signal breaks off may raise anything
        return _interruption(SystemExit(128 + signals[0]))
    if isinstance(error, BrokenPipeError) and not os.environ.get("LM_DEBUG"):
        return 1  # nobody reads the output any more, as after `| head`
    line, code = _describe(error)
    if line is None or os.environ.get("LM_DEBUG"):
        traceback.print_exception(error)
    if line is not None or job:
        text = (line or f"{type(error).__name__}: {error}").strip()
        message = printable(re.sub(r"\s*\n\s*", " ", text))  # other spaces stay: they may be what a message is about
        _print_error(without_secrets(f"error: {message}{f' (job: {printable(job)})' if job else ''}"))
    return code


def _describe(error: Exception) -> tuple[str | None, int]:
    """The line about an error and the exit code; the line is None for a bug."""
    text = str(error)
    if isinstance(error, UserError):
        return text, 2
    if isinstance(error, OSError) and (error.filename is not None or error.errno in MACHINE):
        name = "" if error.filename is None else f"{error.filename}: "
        advice = "; free some space and run the same command again" if error.errno in DISK_FULL else ""
        return f"{name}{error.strerror or text}{advice}", 1 if error.errno in MACHINE else 2
    no_memory = re.search("can't allocate|size calculation overflowed|segment from shared object$", text)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or no_memory:
        less = "a smaller data.batch_size, trainer.accumulate_grad_batches, loss=chunked, activation_checkpointing=true"
        return f"out of memory; these settings need less: {less}", 1
    if "returned nan values" in text:  # with trainer.detect_anomaly, which has shown where
        return f"{text.splitlines()[0].rstrip('.')}; choose a lower optim.lr", 2
    if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
        return f"compile=true: {text.splitlines()[0]}; a new run with compile=false needs no compiler", 2
    if isinstance(error, RuntimeError) and re.search("gloo|NCCL|TCPStore|ProcessGroup", text):  # torch.distributed
        reason = re.sub(r"^\[[^]]*\] |\. .*", "", text.splitlines()[0])  # without its source file and its advice
        return f"another process of this run has ended ({reason}){_resume_hint(error)}", 1
    return None, 1


def _interruption(error: BaseException) -> int:
    """The exit code after Ctrl-C, SIGTERM or SIGHUP, also where training has saved first, or of any other exit."""
    signum = signal.SIGINT if isinstance(error, KeyboardInterrupt) else getattr(error, "signum", None)
    code = getattr(error, "code", None) if signum is None else 128 + signum
    if not isinstance(code, int):
        raise error
    if code in INTERRUPTED and logging.getLogger("lm").isEnabledFor(logging.INFO):
        _print_error(f"{error if hasattr(error, 'signum') else 'interrupted'}{_resume_hint(error)}")
    return code


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Let what ends the command from inside say how to resume it, if the folder exists by then."""
    try:
        yield
    except BaseException as error:
        if folder.exists():
            error.add_note(RESUMABLE)
        raise


def _resume_hint(error: BaseException) -> str:
    if RESUMABLE not in getattr(error, "__notes__", ()):
        return ""
    command = this_command()
    return f"; resume with: {command}" if without_secrets(command) == command else "; the same command resumes it"


def _print_error(line: str) -> None:
    with suppress(OSError):  # nobody reads it
        close_bars()
        print(line, file=sys.stderr, flush=True)


# --- jobs of Hydra


def job(task: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`task` as Hydra calls it, once or with -m for each combination of values, with its error reported at once.

    A failed job of a sweep stops no other, and leaves nothing in memory.
    """
    parent = os.getpid()

    @functools.wraps(task)
    def run(config: Any) -> Any:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        from lm.cli.compose import current_overrides

        in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        if in_sweep:  # some of Hydra's launchers start its jobs in processes of their own
            configure_streams(world_size=1)
        gc.collect()  # the model of the job before may be part of a reference cycle
        try:
            return task(config)
        except Exception as error:
            code = handle_exception(error, " ".join(current_overrides()) if in_sweep else "")
            if os.getpid() != parent:  # the launcher hands over the error
                raise (UserError if code == 2 else RuntimeError)(f"a job of the sweep failed: {error}") from None
            if not in_sweep:
                sys.exit(code)
            failed_jobs.append(code)
            return None

    return run


# --- messages


def configure_streams(world_size: int | None = None) -> None:
    """Send messages of lm to standard error; of the processes of a run, the first one speaks.

    What the encoding of standard output cannot write is written as an escape, as Python does on standard error.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook has a stream of its own
        with suppress(OSError):  # a file that was swapped below it
            sys.stdout.reconfigure(errors="backslashreplace")
    logger = logging.getLogger("lm")
    logger.handlers[:] = [MessageHandler()]
    logger.setLevel(logging.INFO if is_first_process(world_size) else logging.WARNING)
