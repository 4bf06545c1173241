"""What is printed, and by which process."""

import os


def is_first_process() -> bool:
    """Whether this process has the global rank 0, by torchrun, Lightning or Slurm: it alone writes files."""
    rank = next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), "0")
    return rank == os.environ.get("NODE_RANK", "0") == "0"
