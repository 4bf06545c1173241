"""Linear classes of a user, named by model.linear, that disturb one training step."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch


class Brittle(torch.nn.Linear):
    """Fails in a worker process of an ablation."""

    def forward(self, x):
        if multiprocessing.parent_process() is not None:
            raise RuntimeError("a crack | in the glass")
        return super().forward(x)


class Disturbing(torch.nn.Linear):
    """Disturbs the call with the number $DISTURBED_CALL of all layers together, in training."""

    calls = 0

    def forward(self, x):
        if self.training and not x.is_meta:
            Disturbing.calls += 1
            if str(Disturbing.calls) == os.environ["DISTURBED_CALL"]:
                self.disturb()
        return super().forward(x)

    def disturb(self):
        raise NotImplementedError


class Signalling(Disturbing):
    """Raises after a signal."""

    def disturb(self):
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("a layer of mine")


class Exploding(Disturbing):
    """Has infinite weights from that step on."""

    def disturb(self):
        self.weight.data.fill_(torch.inf)


class Long(Disturbing):
    """Takes a minute for one step. $DISTURBED_FILE appears before it."""

    def disturb(self):
        Path(os.environ["DISTURBED_FILE"]).touch()
        time.sleep(60)
