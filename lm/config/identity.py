"""The identity of a run: the settings that decide what it computes, and their hash."""

import hashlib
import json
from dataclasses import asdict
from functools import cache
from typing import Any

from lm.config.run import RUNTIME, RunConfig


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return leaves


def identifying(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide what a run computes, as dotted keys."""
    found = {key: value for key, value in flat(settings).items() if not is_runtime(key)}
    if found.get("init_sha256"):  # the tokenizer is that of the loaded model, wherever its file lies
        found.pop("tokenizer.path", None)
    return found


@cache
def is_runtime(key: str) -> bool:
    return any(key == one or key.startswith(one + ".") for one in RUNTIME)


def config_hash(run: RunConfig) -> str:
    """The same for equal settings on any machine. The thread count is left out and compared on resume instead."""
    settings = identifying(asdict(run) | {"threads": None})
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
