"""Schema of benchmark.py."""

from dataclasses import dataclass
from pathlib import Path

from lm.config import BadInput, at_least, choose

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
    threads: int | None = None
    run_dir: str | None = None  # a finished run, for prompt-lookup decoding of its own validation text
    nanogpt: str | None = None  # a clone of nanoGPT, for its training step beside ours

    def __post_init__(self) -> None:
        for name in self.only or ():
            choose("only", name, SECTIONS)
        if self.only == []:
            raise BadInput(f"only: is empty; choose among {', '.join(SECTIONS)}, or leave it out")
        if self.output is not None and not Path(self.output).expanduser().parent.is_dir():
            raise BadInput(f"output={self.output}: its folder does not exist")
        if self.output is not None and Path(self.output).expanduser().is_dir():
            raise BadInput(f"output={self.output}: is a folder; expected the name of a file")
        if self.run_dir is not None and "decoding" not in (self.only or SECTIONS):
            raise BadInput("run_dir: is for only=[decoding], or for all sections")
        if self.nanogpt is None and "nanogpt" in (self.only or ()):
            raise BadInput("nanogpt: is missing; give it as nanogpt=DIR, a clone of nanoGPT")
        if self.nanogpt is not None and not {"nanogpt", "busy"} & {*(self.only or SECTIONS)}:
            raise BadInput("nanogpt: is for only=[nanogpt], only=[busy], or for all sections")
        if self.nanogpt is not None and not (Path(self.nanogpt).expanduser() / "model.py").is_file():
            raise BadInput(f"nanogpt={self.nanogpt}: holds no model.py; expected a clone of nanoGPT")
        at_least(0, "", self, "seconds")
        at_least(1, "", self, "threads")
