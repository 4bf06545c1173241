"""The command line of benchmark."""

from dataclasses import dataclass
from pathlib import Path

from lm.config.checks import BadInput, at_least, choose, expect

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
        expect(self.only != [], "only=[]", f"some of {', '.join(SECTIONS)}")
        for name in self.only or ():
            choose("only", name, SECTIONS)
        if self.output is not None:
            path = Path(self.output).expanduser()
            is_file = path.parent.is_dir() and not path.is_dir()
            expect(is_file, f"output={self.output}", "the name of a file in a folder that exists")
        if self.nanogpt is None and "nanogpt" in (self.only or ()):
            raise BadInput("nanogpt: is missing; give it as nanogpt=DIR, a clone of nanoGPT")
        if self.nanogpt is not None and not (Path(self.nanogpt).expanduser() / "model.py").is_file():
            raise BadInput(f"nanogpt={self.nanogpt}: holds no model.py; expected a clone of nanoGPT")
        at_least(0, "", self, "seconds")
        at_least(1, "", self, "threads")
