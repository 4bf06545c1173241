"""A stand-in for wandb, which writes what it is told to a file."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class Tracked:
    """A run; its `config` is itself."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.config = self
        self.write("init", options)

    def write(self, event: str, content: Any = None) -> None:
        with open(os.environ["TRACKED"], "a") as file:
            file.write(json.dumps([event, content], default=str) + "\n")

    def update(self, params: dict[str, Any], **_: Any) -> None:
        self.write("config", params)

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.write("log", metrics if step is None else {"step": step, **metrics})

    def finish(self) -> None:
        self.write("finish")


def use_stand_in(folder: Path, refuses: bool = False) -> None:
    """Let this process import it. `refuses`: nobody has logged in."""

    def init(**options: Any) -> Tracked:
        if refuses:
            raise RuntimeError("not logged in\nsee the manual")
        return Tracked(options)

    os.environ |= {"TRACKED": str(folder / "tracked"), "WANDB_API_KEY": "a secret"}
    for name in ("wandb", "wandb.sdk", "wandb.sdk.lib", "wandb.wandb_run"):
        sys.modules[name] = ModuleType(name)
    vars(sys.modules["wandb"]).update(init=init, run=None)
    sys.modules["wandb.sdk.lib"].RunDisabled = sys.modules["wandb.wandb_run"].Run = type(None)  # type: ignore[attr-defined]
    metadata = folder / "wandb-99.dist-info/METADATA"  # Lightning looks for the version
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 99\n")
    sys.path.insert(0, str(folder))


def tracked(folder: Path) -> list[tuple[str, Any]]:
    """What it was told: events, and their contents."""
    return [*map(json.loads, (folder / "tracked").read_text().splitlines())]
