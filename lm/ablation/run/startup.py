"""What a run takes beyond its steps: its process, the model, the final samples and saving."""

import logging
import tempfile
import time
from pathlib import Path

from lm.ablation.plan.arms import Arm
from lm.ablation.plan.cells import cell
from lm.ablation.run.workers import PROCESSES, run_cells

log = logging.getLogger(__name__)


def measure_startup(arm: Arm, gpus: int) -> float:
    """Seconds, from a real run of one step that leaves nothing behind."""
    log.info("measuring what a run takes beyond its steps")
    first = PROCESSES.Process(target=int)  # waits until the server of the workers has done its imports
    first.start()
    first.join()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        run_cells([cell(arm, 0, 1, {})], Path(folder), 1, gpus, lambda *_: None)
        return max(0.0, time.perf_counter() - started - arm.seconds(1))
