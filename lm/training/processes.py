"""The processes of a run, as Fabric starts or finds them, and the signals that end a run."""

import atexit
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment

from lm.config import TrainerConfig
from lm.errors import UserError, first_line
from lm.system.signals import SHUTDOWN, is_ignored, is_impatient

STOPPING = b"stopping after this step; a second signal, such as Ctrl-C, stops at once\n"
COVER = b"\r\x1b[K"  # erases the line of a terminal, on which a progress bar may stand
log = logging.getLogger(__name__)


def build_fabric(trainer: TrainerConfig) -> Fabric:
    """Return the device, the precision and the processes of a resolved run.

    torchrun or Slurm may have started the processes. Raises UserError if they cannot be had.
    """
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # hides tips
    warnings.filterwarnings("ignore", module="lightning_fabric", message=".*srun.*")
    launchers = {"TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "MASTER_ADDR"}
    if trainer.num_nodes > 1 and not launchers & {*os.environ}:
        expected = "torchrun or srun, which start the processes of all nodes (docs/clusters.md)"
        raise UserError(f"trainer.num_nodes={trainer.num_nodes}: expected {expected}")
    is_single = trainer.world_size == 1
    try:
        fabric = Fabric(
            accelerator=trainer.accelerator,
            devices=trainer.devices,
            num_nodes=trainer.num_nodes,
            strategy="auto" if is_single else trainer.strategy,
            precision=trainer.precision,  # type: ignore[arg-type]
            # A run in one process has no rank, whatever number srun, torchrun or MPI gave the process.
            plugins=[LightningEnvironment()] if is_single else None,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(f"trainer: {first_line(error)}") from error
    if fabric.world_size != trainer.world_size:
        product = f"trainer.devices * trainer.num_nodes is {trainer.world_size}"
        raise UserError(f"trainer.devices: {product}, but {fabric.world_size} processes train")
    if not is_single:
        atexit.register(_leave_process_group)
    return fabric


def _leave_process_group() -> None:
    """Destroy the process group at exit: a Gloo thread that is still busy would abort the process.

    Lightning destroys the group for NCCL only. This call blocks until pending collectives have ended.
    """
    for signum in handled_signals():  # Python calls no handlers while the call blocks
        signal.signal(signum, signal.SIG_DFL)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Interrupted(BaseException):
    """A signal has stopped the run after a whole step. No Exception, so that a sweep stops too."""

    def __init__(self, signum: int, step: int) -> None:
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        super().__init__(f"stopped by {name} after step {step}")
        self.signum = signum


class Signals:
    """Notes a signal inside of `deferred`, where Interrupts of lm/cli/main.py would raise.

    A second signal ends the process if `is_impatient` says so.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.arrived_at = 0.0  # by the monotonic clock

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals while inside. Only the main thread has signals to handle."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {signum: signal.signal(signum, self._note) for signum in handled_signals()}
        try:
            yield
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        signum = signal.SIGTERM if signum == signal.SIGUSR1 else signum  # Slurm's warning of a time limit
        now = time.monotonic()
        if self.signum is None:
            self.signum, self.arrived_at = signum, now
            if log.isEnabledFor(logging.INFO):
                with suppress(OSError):  # no logging in a handler, which may interrupt a message
                    os.write(2, COVER + STOPPING if os.isatty(2) else STOPPING)
        elif is_impatient(signum, now - self.arrived_at):
            os._exit(128 + signum)

    def arrived(self, fabric: Fabric, step: int) -> Interrupted | None:
        """Return what to raise if a signal has arrived at any process. All call this after the same step."""
        has_arrived: Any = float(self.signum is not None)
        if fabric.world_size > 1:
            has_arrived = fabric.all_reduce(has_arrived, reduce_op="sum")
        return Interrupted(self.signum or signal.SIGTERM, step) if has_arrived else None


def handled_signals() -> list[signal.Signals]:
    """Return the signals of a shutdown, without SIGHUP if nohup ignores it, and SIGUSR1 if it has no handler."""
    signums = [s for s in SHUTDOWN if s != signal.SIGHUP or not is_ignored(s)]
    return signums + [signal.SIGUSR1] * (signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)
