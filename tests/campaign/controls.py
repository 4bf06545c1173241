"""Mechanisms that can be switched off: without any one of them the campaign must fail."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

PATIENCE = 300  # cases within which the campaign must fail


def put(place: str, make: Callable[[Any], Any]) -> None:
    """Replace a function, given as module:name or module:class.name, by what `make` makes of it."""
    module, _, path = place.partition(":")
    owner: Any = import_module(module)
    *outer, name = path.split(".")
    for one in outer:
        owner = getattr(owner, one)
    setattr(owner, name, make(getattr(owner, name)))


def off(place: str, value: Any = None) -> Callable[[], None]:
    """Make a function do nothing but return `value`."""
    return lambda: put(place, lambda _: lambda *args, **options: value)


def other(place: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    return lambda: put(place, make)


@contextmanager
def in_place(folder: Path, name: Any) -> Iterator[Any]:
    with open(folder / (name if isinstance(name, str) else "step-00000002-0000000000000000.ckpt"), "wb") as file:
        yield file


def atomic() -> None:
    for name, module in [*sys.modules.items()]:
        if name.startswith("lm.") and hasattr(module, "atomic_file"):
            put(f"{name}:atomic_file", lambda _: in_place)


def expected(name: str, key: str) -> Callable[[Any], Callable[[Path], str]]:
    """In place of a hash, the one that a file beside says that it should be."""

    def make(real: Callable[[Path], str]) -> Callable[[Path], str]:
        def hash_of(path: Path) -> str:
            beside = path.with_name(name)
            return str(json.loads(beside.read_text())[key][path.name]) if beside.exists() else real(path)

        return hash_of

    return make


def lock() -> None:
    import filelock

    for kind in (filelock.FileLock, filelock.BaseFileLock):
        kind.acquire = lambda self, *args, **options: nullcontext()  # type: ignore[method-assign,assignment]


def special_tokens() -> None:
    def spelled(init: Any) -> Any:
        def then(self: Any, *args: Any) -> None:
            init(self, *args)
            self.backend.encode_special_tokens = False

        return then

    off("lm.data.tokenizer:Tokenizer.eot_in_text", False)()
    put("lm.data.tokenizer:Tokenizer.__init__", spelled)


def raising(error: Exception) -> int:
    raise error


def from_the_start(init: Any) -> Any:
    return lambda self, *args, **options: init(self, *args, **options | {"start": 0})


def by_its_name(sha256: Any) -> Any:
    return lambda path: path.stem[-16:] if path.suffix == ".ckpt" else sha256(path)


def without_checksum(_: Any) -> Any:
    return lambda found: {key: found[key] for key in found if key != "checksum"}


def newest(_: Any) -> Any:
    return lambda self: next(iter(self.paths()), None)


def no_fingerprint(_: Any) -> Any:
    from lm.data.documents import Fingerprint

    return lambda self: Fingerprint("", 0)


def one_by_one(_: Any) -> Any:
    return lambda self, ids: (self.decode([one]) for one in ids)


def any_pickle(load: Any) -> Any:
    return lambda *args, **options: load(*args, **options | {"weights_only": False})


CONTROLS: dict[str, tuple[str, Callable[[], object]]] = {  # mechanism -> the part that must fail, what switches it off
    "atomic-files": ("kills resume", atomic),
    "place-in-the-data": ("kills", other("lm.training.task:TrainingStream.__init__", from_the_start)),
    "removal-of-partial-files": ("kills", off("lm.training.run_directory:remove_partial")),
    "errors-in-one-line": ("faults", other("lm.cli.launch:report", lambda _: raising)),
    "hashes-of-tokens": ("damage val.bin", other("lm.data.tokens:checksum", expected("meta.json", "checksums"))),
    "hash-of-a-checkpoint": ("damage step-00000004", other("lm.training.checkpoint:sha256", by_its_name)),
    "earlier-checkpoint": ("damage step-00000004", other("lm.training.checkpoint:Checkpoints.newest", newest)),
    "hash-of-weights": (
        "damage model.safetensors",
        other("lm.exchange.portable:sha256", expected("config.json", "sha256")),
    ),
    "seal-of-settings": ("damage model/config.json", other("lm.exchange.find_model:unsealed", without_checksum)),
    "seal-of-results": ("damage run/result.json", other("lm.training.finished:unsealed", without_checksum)),
    "hash-of-rows": (
        "damage results.csv",
        other("lm.ablation.outcomes:row_hash", lambda _: lambda row: row.get("row_hash", "")),
    ),
    "hash-of-curves": ("damage cells/*/metrics.csv", off("lm.report.metrics:hash_name", "")),
    "hash-of-rows-of-curves": ("damage curves.csv", other("lm.ablation.outcomes:CURVE", lambda _: "none")),
    "rows-before-a-checkpoint": ("damage half/metrics.csv", off("lm.training.checkpoint:Checkpoints.metrics_hash")),
    "seal-of-a-record": ("damage ablation.json", other("lm.ablation.record:unsealed", without_checksum)),
    "weights-only": ("hostile", other("torch:load", any_pickle)),
    "no-aliases": ("hostile", other("yaml:parse", lambda _: lambda *args, **options: ())),
    "lock-of-a-run": ("limits many", lock),
    "state-of-a-source": ("limits a_text_that_changes", other("lm.data.documents:Files.fingerprint", no_fingerprint)),
    "whole-characters": ("prompts", other("lm.data.tokenizer:Tokenizer.stream", one_by_one)),
    "special-tokens-as-text": ("prompts", special_tokens),
    "exit-code-of-a-refusal": ("typos", off("lm.cli.launch:complain", 0)),
}
