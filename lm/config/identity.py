"""The identity of a run: the settings that decide what it computes, and their hash."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

from lm.config.run import RUNTIME, RunConfig

# Settings that did not exist in the first version, with the value that has the effect of their absence. At this value
# a setting is no part of a run's identity, so earlier runs keep their hash.
ADDED: dict[str, Any] = {
    "model.d_head": None,
    "model.norm_eps": 1e-5,
    "model.attention_bias": None,
    "model.rope_scaling": None,
    "model.vocab_rows": None,
    **dict.fromkeys(("model.lora_rank", "model.lora_alpha", "model.lora_targets")),
    "data.document_mask": False,
    **dict.fromkeys(("data.name", "data.revision", "data.val_split", "data.val_path")),
    "data.rows": "documents",
    "data.max_bytes": None,
    "data.val_max_bytes": 4_000_000,  # where it has an effect, the hash of the data says so
    "init_sha256": None,
    "init_tied_matrix": None,
}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return leaves


def identifying(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide what a run computes, as dotted keys."""

    def decides(key: str, value: Any) -> bool:
        return not is_runtime(key) and not (key in ADDED and value == ADDED[key])

    found = {key: value for key, value in flat(settings).items() if decides(key, value)}
    if found.get("init_sha256"):  # the tokenizer is that of the loaded model, wherever its file lies
        found.pop("tokenizer.path", None)
    return found


@cache
def is_runtime(key: str) -> bool:
    return any(key == one or key.startswith(one + ".") for one in RUNTIME)


def config_hash(run: RunConfig, names: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> str:
    """The same for equal settings on any machine. The thread count is left out and compared on resume instead.

    `names` may give the settings other names: `lm.config.renamed.earlier` gives the hash of an earlier version.
    """
    settings = names(identifying(asdict(run) | {"threads": None}))
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
