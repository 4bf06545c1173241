"""Settings of model, head, text and commands are refused by name. Those of a run: tests/test_run_config.py."""

import math
import re
from dataclasses import fields
from typing import Any

import pytest

from lm.config import (
    HEADS,
    DataConfig,
    EvaluateConfig,
    GenerateConfig,
    HeadConfig,
    ModelConfig,
    TokenizerConfig,
    UserError,
)
from lm.config.model import OWN_SETTINGS

NAN = math.nan
UNTIED = {"kind": "untied", "head_std": 0.02, "head_lr_multiplier": 1.0}
SPLIT = {"kind": "untied_midtraining", "head_lr_multiplier": 1.0, "untie_at": 0.5}
OWN = {kind: set(keys) for kind, keys in OWN_SETTINGS.items()}

# schema, settings that are refused, key of the message, what the message expects
REFUSED: list[tuple[type, dict[str, Any], str, str]] = [
    *((ModelConfig, {key: 0}, f"model.{key}", "1 or more") for key in ("n_layers", "d_model", "n_heads", "d_ff")),
    *((ModelConfig, {key: -1}, f"model.{key}", "1 or more") for key in ("n_layers", "d_model", "n_kv_heads", "d_ff")),
    *((ModelConfig, {key: "none such"}, f"model.{key}", "choose one of") for key in ("norm", "ffn", "position")),
    *((ModelConfig, {"dropout": value}, "model.dropout", "0 or more") for value in (-0.1, NAN)),
    *((ModelConfig, {"dropout": value}, "model.dropout", "less than 1") for value in (1.0, 2.0)),
    *((ModelConfig, {"residual_scale": value}, "model.residual_scale", "0 or more") for value in (-0.1, NAN)),
    *((ModelConfig, {"rope_theta": value}, "model.rope_theta", "above 0") for value in (0, -1, NAN)),
    (ModelConfig, {"d_model": 30, "n_heads": 4}, "model.d_model=30", "not divisible by model.n_heads=4"),
    (ModelConfig, {"n_heads": 4, "n_kv_heads": 3}, "model.n_heads=4", "not divisible by model.n_kv_heads=3"),
    (ModelConfig, {"n_heads": 4, "n_kv_heads": 8}, "model.n_heads=4", "not divisible by model.n_kv_heads=8"),
    (ModelConfig, {"d_model": 12, "n_heads": 4}, "model.position=rope", "even head width"),
    (HeadConfig, {"kind": "twisted"}, "head.kind=twisted", "choose one of tied, untied"),
    *(
        (HeadConfig, {key: value}, f"head.{key}", "0 or more")
        for key in ("embedding_std", "embedding_multiplier", "embedding_lr_multiplier")
        for value in (-0.1, NAN, math.inf)
    ),
    *((HeadConfig, UNTIED | {key: -0.1}, f"head.{key}", "0 or more") for key in ("head_std", "head_lr_multiplier")),
    *(
        (
            HeadConfig,
            {"kind": kind, **dict.fromkeys(sorted(own | {key}), 1.0)},
            f"head.{key}=1.0",
            f"head.kind={kind} has none",
        )
        for kind, own in OWN.items()
        for key in sorted({"head_std", "head_lr_multiplier", "untie_at"} - own)
    ),
    *(
        (
            HeadConfig,
            {"kind": kind, **dict.fromkeys(sorted(own - {key}), 1.0)},
            f"head.{key}",
            f"head.kind={kind} needs one",
        )
        for kind, own in OWN.items()
        for key in sorted(own)
    ),
    *((HeadConfig, SPLIT | {"untie_at": value}, "head.untie_at", "0 or more") for value in (-0.1, NAN)),
    *((HeadConfig, SPLIT | {"untie_at": value}, "head.untie_at", "0 to 1, a fraction") for value in (1.01, 800)),
    (DataConfig, {"source": "cloud"}, "data.source=cloud", "choose one of stdlib, text"),
    *((DataConfig, {key: 0}, f"data.{key}=0", "1 or more") for key in ("seq_len", "batch_size")),
    (DataConfig, {"overfit_batches": -1}, "data.overfit_batches=-1", "0 or more"),
    *(
        (DataConfig, {"val_fraction": value}, "data.val_fraction", "between 0 and 1")
        for value in (0, 1, -0.1, 1.1, NAN)
    ),
    *(
        (DataConfig, {"source": source, "path": path}, "data.path", f"data.source={source} needs one")
        for source in ("text", "json", "csv", "parquet", "hub")
        for path in (None, "")
    ),
    (TokenizerConfig, {"kind": "words"}, "tokenizer.kind=words", "choose one of bpe, char"),
    *((TokenizerConfig, {"vocab_size": size}, "tokenizer.vocab_size", "257 or more") for size in (256, 0, -1, None)),
    *(
        (TokenizerConfig, {"kind": kind}, "tokenizer.vocab_size=2048", "decides its own size")
        for kind in ("char", "byte", "file")
    ),
    (TokenizerConfig, {"kind": "file", "vocab_size": None}, "tokenizer.path", "tokenizer=file"),
    (TokenizerConfig, {"path": "tokenizer.json"}, "tokenizer.path", "tokenizer=file"),
    *(
        (GenerateConfig, {"run_dir": "r", key: -1}, f"{key}=-1", "0 or more")
        for key in ("max_new_tokens", "temperature")
    ),
    (GenerateConfig, {"run_dir": "r", "seed": 2**63}, "seed=", "expected 0 to"),
    *((GenerateConfig, {"run_dir": "r", "temperature": value}, "temperature", "0 or more") for value in (-0.5, NAN)),
    (GenerateConfig, {"run_dir": "r", "threads": 0}, "threads=0", "1 or more"),
    *((EvaluateConfig, {"run_dir": "r", key: 0}, f"{key}=0", "1 or more") for key in ("threads",)),
]


@pytest.mark.parametrize(
    ("schema", "settings", "key", "expected"), REFUSED, ids=[f"{row[0].__name__}-{row[1]}" for row in REFUSED]
)
def test_what_cannot_be_is_refused_by_name(schema: type, settings: dict[str, Any], key: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        schema(**settings)
    assert re.match(rf"{re.escape(key)}\b", str(caught.value))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


ALLOWED: list[tuple[type, dict[str, Any]]] = [
    (ModelConfig, {"n_kv_heads": 1, "dropout": 0.0, "residual_scale": 0.0}),
    (ModelConfig, {"d_model": 12, "n_heads": 4, "position": "learned"}),
    (ModelConfig, {"d_model": 12, "n_heads": 4, "position": "none"}),
    (HeadConfig, UNTIED | {"head_std": 0.0}),
    *((HeadConfig, SPLIT | {"untie_at": value}) for value in (0, 1)),
    *((HeadConfig, {"embedding_multiplier": value}) for value in (None, 0.0, 7.5)),
    (TokenizerConfig, {"vocab_size": 257}),
    (TokenizerConfig, {"kind": "file", "vocab_size": None, "path": "tokenizer.json"}),
    (DataConfig, {"seq_len": 1, "batch_size": 1, "source": "text", "path": "x"}),
]


@pytest.mark.parametrize(("schema", "settings"), ALLOWED)
def test_the_edge_of_what_can_be_is_allowed(schema: type, settings: dict[str, Any]) -> None:
    config = schema(**settings)
    assert {key: getattr(config, key) for key in settings} == settings


def test_every_kind_of_head_says_which_settings_are_its_own() -> None:
    assert set(OWN) == set(HEADS)
    assert OWN["tied"] == set()
    assert OWN["untied"] == {"head_std", "head_lr_multiplier"}


def test_heads_widths_follow_from_the_counts() -> None:
    assert ModelConfig(d_model=96, n_heads=6).head_dim == 16
    assert ModelConfig(n_heads=6, d_model=96).kv_heads == 6
    assert ModelConfig(n_heads=6, d_model=96, n_kv_heads=2).kv_heads == 2


@pytest.mark.parametrize("schema", [ModelConfig, HeadConfig, DataConfig, TokenizerConfig])
def test_no_schema_takes_a_key_it_does_not_name(schema: type) -> None:
    config = schema()
    with pytest.raises(AttributeError):
        config.no_such_key = 1
    assert {one.name for one in fields(config)} == set(schema.__slots__)


def test_a_path_that_would_not_be_read_is_refused() -> None:
    with pytest.raises(UserError):
        DataConfig(path="my.txt")
