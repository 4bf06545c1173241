"""The processes of a distributed run, as torchrun, Slurm or Lightning number them."""

import os

RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # torchrun's, Lightning's, Slurm's


def is_first_process() -> bool:
    """Whether this is the process, the only one of them all, that writes files and prints."""
    rank = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    return rank == os.environ.get("NODE_RANK", "0") == "0"
