"""The console command: lm-lab COMMAND [group=choice] [key=value ...]

Exceptions end in `report_error`, called here and for each job of a sweep. Exit codes: 0 done; 1 a fault
of the program, no memory or disk space, or failed runs of an ablation; 2 bad input; 129, 130 and 143
interrupted by SIGHUP, SIGINT and SIGTERM. LM_DEBUG=1 in the environment shows the traceback of every
error.
"""

import difflib
import errno
import io
import logging
import os
import re
import shlex
import signal
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

import lm
from lm.cli import COMMANDS, NAME, command_line, started_by
from lm.errors import RESUMABLE, UserError, first_line, is_out_of_memory, without_secrets
from lm.system.signals import SHUTDOWN, Interrupts
from lm.system.terminal import MessageHandler, close_bars, is_first_process, printable, wrapped

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors of the machine, which no other path or permission mends.
MACHINE = (*DISK_FULL, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOLCK, errno.EOPNOTSUPP)


def main(command: str | None = None) -> NoReturn:
    """Run a command, by default the one that the first argument names, and exit with its code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # a service has closed the stream
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    configure_messages()
    interrupts = Interrupts()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # lets Hydra's errors come here as they are
    try:
        code = _run(command, sys.argv[1:])
        sys.stdout.flush()  # an error of writing belongs to the command
    except Exception as error:
        if interrupts.signum is None or isinstance(error, UserError):
            code = report_error(error)
        else:  # code that a signal breaks off may raise anything
            code = report_interruption(SystemExit(128 + interrupts.signum))
    except BaseException as error:
        code = report_interruption(error)
    for signum in SHUTDOWN if interrupts.signum else ():
        signal.signal(signum, signal.SIG_IGN)  # a later signal must not change the exit code
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Python would try again at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def _run(command: str | None, args: list[str]) -> int:
    is_completion = args[:1] in (["-sc"], ["--shell-completion"])
    if is_completion and command is None:
        command = _take_command_off_the_line()
        if command is None:
            print(*COMMANDS)
            return 0
    if command is None and (not args or args[0] in ("-h", "--help", "help")):
        _print_usage()
        return 0
    if command is None:
        command, *args = args
    if "--version" in (command, *args):
        print(f"{NAME} {lm.__version__}")
        return 0
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, 1)
        advice = f"did you mean {command_line(close[0], *args)}?" if close else f"{NAME} --help lists them"
        raise UserError(f"{command}: no such command; {advice}")
    for arg in args:
        if re.search("[\ud800-\udfff]", arg):
            raise UserError(f"{arg}: not UTF-8; rename the file, or set PYTHONUTF8=1")
    module = import_module(COMMANDS[command].module)
    if {"-h", "--help"} & {*args}:
        from lm.cli.help import help_text

        print(help_text(command, module, "all" in args))
        return 0
    if is_completion and not getattr(module, "IS_HYDRA", False):
        print(*(f"{key}=" for key in module.SCHEMA.__slots__))
        return 0
    return int(module.run(args) or 0)


def _take_command_off_the_line() -> str | None:
    """Return the command of the line to complete, and leave the rest to Hydra, which knows no commands."""
    program, _, words = os.environ.get("COMP_LINE", "").partition(" ")
    command, space, rest = words.partition(" ")
    if program and not space:
        return None
    os.environ["COMP_LINE"] = f"{program} {rest}"
    return command or "train"


def _print_usage() -> None:
    start = shlex.join(started_by())
    print(f"usage: {start} COMMAND [group=choice] [key=value ...]\n")
    for name, row in COMMANDS.items():
        print(wrapped(f"  {name:10} {row.summary}", rest=" " * 13))
    print(wrapped(f"\n{start} COMMAND --help shows the groups and settings of a command."))


# --- where exceptions end


def report_error(error: Exception, job: str = "") -> int:
    """Print an error, in one line where the user can correct it, and return the exit code."""
    if isinstance(error, BrokenPipeError) and not os.environ.get("LM_DEBUG"):
        return 1  # nobody reads the output any more, as after `| head`
    line, code = _describe(error)
    if line is None or os.environ.get("LM_DEBUG"):
        traceback.print_exception(error)
    if line is not None or job:
        text = (line or f"{type(error).__name__}: {error}").strip()
        message = printable(re.sub(r"\s*\n\s*", " ", text))
        suffix = f" (job: {printable(job)})" if job else ""
        _print_line(without_secrets(f"error: {message}{suffix}"))
    return code


def _describe(error: Exception) -> tuple[str | None, int]:
    """Return the line about an error, None for a bug, and the exit code."""
    text = str(error)
    first = first_line(error)
    if isinstance(error, UserError):
        return text, 2
    if isinstance(error, OSError) and (error.filename is not None or error.errno in MACHINE):
        name = "" if error.filename is None else f"{error.filename}: "
        advice = "; free some space and run the same command again" if error.errno in DISK_FULL else ""
        return f"{name}{error.strerror or text}{advice}", 1 if error.errno in MACHINE else 2
    if is_out_of_memory(error):
        smaller = "data.batch_size, trainer.accumulate_grad_batches"
        others = "activation_checkpointing=true, loss=chunked (with ngram_smoothing=0)"
        return f"out of memory; these settings need less memory: {smaller}, {others}", 1
    if "returned nan values" in text:  # trainer.detect_anomaly has shown where
        return f"{first.rstrip('.')}; choose a lower optim.lr_scale, the factor of all learning rates", 2
    if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
        return f"compile=true: {first}; compile=false needs no compiler", 2
    if isinstance(error, RuntimeError) and re.search("gloo|NCCL|TCPStore|ProcessGroup", text):
        reason = re.sub(r"^\[[^]]*\] |\. .*", "", first)  # without a source file and advice
        return f"another process of this run has ended ({reason}){_resume_hint(error)}", 1
    return None, 1


def report_interruption(error: BaseException) -> int:
    """Print a line about a signal, and return the exit code of the signal or of any other exit."""
    if isinstance(error, KeyboardInterrupt):
        code: Any = 128 + signal.SIGINT
    else:
        signum = getattr(error, "signum", None)
        code = getattr(error, "code", None) if signum is None else 128 + signum
    if not isinstance(code, int):
        raise error
    if code - 128 in SHUTDOWN and logging.getLogger("lm").isEnabledFor(logging.INFO):
        what = str(error) if hasattr(error, "signum") else "interrupted"
        _print_line(f"{what}{_resume_hint(error)}")
    return code


def _resume_hint(error: BaseException) -> str:
    if RESUMABLE not in getattr(error, "__notes__", ()):
        return ""
    words = [word for word in sys.argv[1:] if not re.match(r"\+*checkpoint\.resume=", word)]  # was asked for once
    command = shlex.join([*started_by(), *words])
    is_public = without_secrets(command) == command
    return f"; resume with: {command}" if is_public else "; the same command resumes it"


def _print_line(line: str) -> None:
    with suppress(OSError):  # nobody reads standard error
        close_bars()
        print(line, file=sys.stderr, flush=True)


# --- messages


def configure_messages(world_size: int = 1) -> None:
    """Send messages of lm to standard error; in a run of several processes the first process speaks.

    Standard output escapes what its encoding cannot write, as standard error does.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook has a stream of its own
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    logger = logging.getLogger("lm")
    logger.handlers[:] = [MessageHandler()]
    logger.setLevel(logging.INFO if is_first_process(world_size) else logging.WARNING)
