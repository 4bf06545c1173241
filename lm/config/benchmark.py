"""The command line of benchmark."""

from dataclasses import dataclass

from lm.config.checks import require_choice, require_min

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
            require_choice("only", name, SECTIONS)
        require_min(0, "", self, "seconds")
        require_min(1, "", self, "threads")
