"""Mechanisms that can be switched off: without any one of them the campaign must fail."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

PATIENCE = 300  # cases within which the campaign must fail
Switch = Callable[[], object]


def put(place: str, make: Callable[[Any], Any]) -> None:
    """Replace what is at module:name or module:class.name by what `make` makes of it."""
    module, _, path = place.partition(":")
    owner: Any = import_module(module)
    *outer, name = path.split(".")
    for one in outer:
        owner = getattr(owner, one)
    setattr(owner, name, make(getattr(owner, name)))


def other(place: str, make: Callable[[Any], Any]) -> Switch:
    return lambda: put(place, make)


def off(place: str, value: Any = None) -> Switch:
    """Make a function do nothing but return `value`."""
    return other(place, lambda _: lambda *args, **options: value)


@contextmanager
def in_place(folder: Path, name: Any) -> Iterator[Any]:
    with open(folder / (name if isinstance(name, str) else "step-00000002-0000000000000000.ckpt"), "wb") as file:
        yield file


def atomic() -> None:
    for name, module in [*sys.modules.items()]:
        if name.startswith("lm.") and hasattr(module, "atomic_file"):
            put(f"{name}:atomic_file", lambda _: in_place)


def beside(file: str, key: str) -> Callable[[Any], Any]:
    """In place of a hash, the one that a file beside says that it should be."""

    def of(path: Path, real: Any) -> Any:
        said = path.with_name(file)
        return json.loads(said.read_text())[key][path.name] if said.exists() else real(path)

    return lambda real: lambda path: of(path, real)


def special_tokens() -> None:
    def then(self: Any, init: Any, *args: Any) -> None:
        init(self, *args)
        self.backend.encode_special_tokens = False

    off("lm.data.tokenizer:Tokenizer.eot_in_text", False)()
    put("lm.data.tokenizer:Tokenizer.__init__", lambda init: lambda self, *args: then(self, init, *args))


def errors(_: Any) -> Any:
    def raising(error: Exception) -> int:
        raise error

    return raising


def with_option(**changed: Any) -> Callable[[Any], Any]:
    return lambda real: lambda *args, **options: real(*args, **options | changed)


def without_checksum(_: Any) -> Any:
    return lambda found: {key: found[key] for key in found if key != "checksum"}


def by_its_name(sha256: Any) -> Any:
    return lambda path: path.stem[-16:] if path.suffix == ".ckpt" else sha256(path)


def no_fingerprint(_: Any) -> Any:
    from lm.data.documents import Fingerprint

    return lambda self: Fingerprint("", 0)


CONTROLS: dict[str, tuple[str, Switch]] = {  # mechanism -> the part that must fail, in cases about what; the switch
    "atomic-files": ("kills resume", atomic),
    "place-in-the-data": ("kills", other("lm.training.task:TrainingStream.__init__", with_option(start=0))),
    "removal-of-partial-files": ("kills", off("lm.training.run_directory:remove_partial")),
    "errors-in-one-line": ("faults", other("lm.cli.launch:report", errors)),
    "hashes-of-tokens": ("damage val.bin", other("lm.data.tokens:checksum", beside("meta.json", "checksums"))),
    "hash-of-a-checkpoint": ("damage step-00000004", other("lm.training.checkpoint:sha256", by_its_name)),
    "earlier-checkpoint": (
        "damage step-00000004",
        other("lm.training.checkpoint:Checkpoints.newest", lambda _: lambda self: next(iter(self.paths()), None)),
    ),
    "hash-of-weights": (
        "damage model.safetensors",
        other("lm.exchange.portable:sha256", beside("config.json", "sha256")),
    ),
    "seal-of-settings": ("damage model/config.json", other("lm.exchange.find_model:unsealed", without_checksum)),
    "seal-of-results": ("damage run/result.json", other("lm.training.finished:unsealed", without_checksum)),
    "seal-of-a-record": ("damage ablation.json", other("lm.ablation.record:unsealed", without_checksum)),
    "hash-of-rows": (
        "damage results.csv",
        other("lm.ablation.outcomes:row_hash", lambda _: lambda row: row["row_hash"]),
    ),
    "hash-of-curves": ("damage cells/*/metrics.csv", off("lm.report.metrics:hash_name", "")),
    "hash-of-rows-of-curves": ("damage curves.csv", other("lm.ablation.outcomes:CURVE", lambda _: "none")),
    "rows-before-a-checkpoint": ("damage half/metrics.csv", off("lm.training.checkpoint:Checkpoints.metrics_hash")),
    "weights-only": ("hostile", other("torch:load", with_option(weights_only=False))),
    "no-aliases": ("hostile", off("yaml:parse", ())),
    "lock-of-a-run": ("limits many", off("filelock:BaseFileLock.acquire", nullcontext())),
    "state-of-a-source": ("limits a_text_that_changes", other("lm.data.documents:Files.fingerprint", no_fingerprint)),
    "whole-characters": (
        "prompts",
        other("lm.data.tokenizer:Tokenizer.stream", lambda _: lambda self, ids: (self.decode([one]) for one in ids)),
    ),
    "special-tokens-as-text": ("prompts", special_tokens),
    "exit-code-of-a-refusal": ("typos", off("lm.cli.launch:complain", 0)),
}
