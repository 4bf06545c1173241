"""The processes of a run, as Fabric starts or finds them, and the signals that end them.

The first signal ends a run between two steps, after a checkpoint, one of impatience at once.
"""

import atexit
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lm.config import UserError
from lm.config.run import TrainerConfig
from lm.system.terminal import is_impatient

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
log = logging.getLogger(__name__)


def build_fabric(trainer: TrainerConfig) -> Fabric:
    """The device, the precision and the processes of a resolved run, which torchrun or Slurm may have started.

    Raises UserError if they cannot be had.
    """
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # not its tips
    warnings.filterwarnings("ignore", module="lightning", message=".*srun.*")
    if trainer.num_nodes > 1 and not {"TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "MASTER_ADDR"} & {*os.environ}:
        expected = "torchrun or srun, which start the processes of all nodes (docs/clusters.md)"
        raise UserError(f"trainer.num_nodes={trainer.num_nodes}: expected {expected}")
    try:
        # a run in one process has no peer to find, and no rank, whatever srun, torchrun or MPI number
        fabric = Fabric(
            accelerator=trainer.accelerator,
            devices=trainer.devices,
            num_nodes=trainer.num_nodes,
            strategy=trainer.strategy if trainer.world_size > 1 else "auto",
            precision=trainer.precision,  # type: ignore[arg-type]
            plugins=[LightningEnvironment()] if trainer.world_size == 1 else None,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(f"trainer: {str(error).splitlines()[0]}") from error
    if fabric.world_size != trainer.world_size:
        product = f"trainer.devices * trainer.num_nodes is {trainer.world_size}"
        raise UserError(f"trainer.devices: {product}, but {fabric.world_size} processes train")
    if fabric.world_size > 1:
        atexit.register(_leave_process_group)
    return fabric


def _leave_process_group() -> None:
    """Destroy the process group when the interpreter exits.

    A Gloo thread that is still busy at exit would abort the process; Lightning destroys the group for NCCL only. This
    blocks until pending collectives have ended: at once where another process has died.
    """
    for signum in handled_signals():  # Python's handlers are not called while this blocks
        signal.signal(signum, signal.SIG_DFL)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# --- signals


class Interrupted(BaseException):
    """A signal has stopped the run after a whole step. Not an Exception, so that a sweep stops as well."""

    def __init__(self, signum: int, step: int) -> None:
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        super().__init__(f"stopped by {name} after step {step}")
        self.signum = signum


class Signals:
    """Notes the first signal that arrives while they are handled."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.handled: list[signal.Signals] = []
        self.first_at: float | None = None  # when the first signal arrived, by the monotonic clock

    @contextmanager
    def handling(self) -> Iterator[None]:
        """A context for training, and for what is saved after it. Only the main thread has signals to handle.

        Python calls signal handlers between two of its own instructions, and one call of torch may take minutes. So
        a thread counts the signals: the interpreter writes each at once to the descriptor that the thread reads.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.handled = handled_signals()
        read, write = os.pipe()
        os.set_blocking(write, False)
        watch = threading.Thread(target=self._count, args=(read,), daemon=True)
        watch.start()
        handlers = {signum: signal.getsignal(signum) for signum in self.handled}
        descriptor = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for signum in self.handled:
            signal.signal(signum, self._on_signal)
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            os.close(write)  # ends the thread
            watch.join()
            os.close(read)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or _reported(signum)

    def _count(self, descriptor: int) -> None:
        while content := os.read(descriptor, 1):
            if (signum := content[0]) not in self.handled:
                continue
            if self.first_at is None:
                self.first_at = time.monotonic()
                log.info("stopping after this step; the same signal again, such as Ctrl-C, stops at once")
            elif is_impatient(signum, time.monotonic() - self.first_at):
                os._exit(128 + _reported(signum))

    def arrived(self, fabric: Fabric, step: int) -> Interrupted | None:
        """What is to be raised if a signal has arrived at any process: all of them call this after the same step."""
        has_arrived: Any = float(self.signum is not None)
        if fabric.world_size > 1:
            has_arrived = fabric.all_reduce(has_arrived, reduce_op="sum")
        if not has_arrived:
            return None
        return Interrupted(self.signum or signal.SIGTERM, step)


def handled_signals() -> list[signal.Signals]:
    """SIGNALS without a SIGHUP that is ignored, as nohup starts a command, and a SIGUSR1 that has another purpose."""
    signums = [signum for signum in SIGNALS if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN]
    return signums + [signal.SIGUSR1] * (signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)


def _reported(signum: int) -> int:
    """The signal by which a run is said to have ended: SIGUSR1 is how Slurm may ask for it before a time limit."""
    return signal.SIGTERM if signum == signal.SIGUSR1 else signum
