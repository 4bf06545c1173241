"""The command line of benchmark."""

from dataclasses import dataclass

from lm.config.checks import at_least, choose

DEFAULT = (
    *("limits", "training", "nanogpt", "compile", "loss", "documents"),
    *("trainer", "optimizer", "gemm", "decoding", "workers", "busy", "scale", "startup", "data"),
)
SECTIONS = (*DEFAULT, "growth", "import")  # "import" takes 10 GB of disk space, "growth" ten minutes


@dataclass(slots=True, kw_only=True)
class BenchmarkConfig:
    only: list[str] | None = None  # sections; null: all but growth and import
    seconds: float = 10.0  # for each comparison, at least; a longer time gives less noise
    output: str | None = None  # a file for the measurements as JSON
    threads: int | None = None  # null: OMP_NUM_THREADS, else the number of cores
    run_dir: str | None = None  # a finished run, for prompt-lookup decoding of its own validation text
    nanogpt: str | None = None  # a clone of nanoGPT, for its training step beside that of lm

    def __post_init__(self) -> None:
        for name in self.only or ():
            choose("only", name, SECTIONS)
        at_least(0, "", self, "seconds")
        at_least(1, "", self, "threads")
