"""What settings refuse, by name, and the edge of what they allow."""

import math
import re
from dataclasses import asdict
from typing import Any

import pytest
from conftest import HEADS

from lm.config import (
    CheckpointConfig,
    DataConfig,
    DiagnosticsConfig,
    EvaluateConfig,
    ExportConfig,
    GenerateConfig,
    HeadConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TokenizerConfig,
    TrainerConfig,
    UserError,
    ValidationConfig,
)
from lm.config.data import SOURCES
from lm.config.model import OWN_SETTINGS
from lm.config.run import PRECISIONS, STRATEGIES
from tests.helpers.runs import MUON

NAN, INF = math.nan, math.inf
UNTIED = {"kind": "untied", "head_std": 0.02, "head_lr_multiplier": 1.0}
SPLIT = {"kind": "untied_midtraining", "head_lr_multiplier": 1.0, "untie_at": 0.5}
OWN = sorted({key for keys in OWN_SETTINGS.values() for key in keys})  # settings that only some kinds of head have
HUB, FILES = {"source": "hub", "path": "a/b"}, {"source": "text", "path": "a/b"}
LORA = {"model": ModelConfig(linear="lora")}
TWO = {"trainer": TrainerConfig(devices=2)}
MIDTRAINING, EVERY = {"head": HEADS["untied_midtraining"]}, {"diagnostics": DiagnosticsConfig(every=5)}
Case = tuple[type, dict[str, Any], str]  # a schema, settings that it refuses, and the start of the message


def each(schema: type, group: str, values: dict[str, Any], **given: Any) -> list[Case]:
    """A case for each value of each key; the message names both."""
    return [(schema, given | {key: value}, f"{group}{key}={value}") for key, many in values.items() for value in many]


REFUSED: list[Case] = [
    *each(ModelConfig, "model.", dict.fromkeys(("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff"), (0,))),
    *each(ModelConfig, "model.", {"n_layers": [10**8], "d_ff": [10**20], "dropout": [-0.1, 1.0, NAN]}),
    *each(ModelConfig, "model.", {"residual_scale": [-0.1], "rope_theta": [0, NAN], "norm_eps": [0, NAN]}),
    *each(ModelConfig, "model.", dict.fromkeys(("linear", "norm", "ffn", "position"), ("", "none such", "a.b-c"))),
    *each(ModelConfig, "model.", {"previous_token_init": [1], "rope_scaling": [[8, 1, 4, 64]]}, position="none"),
    *each(ModelConfig, "model.", {"previous_token_init": [1], "qk_norm": [True]}, norm="none"),
    *each(ModelConfig, "model.", {"rope_scaling": [[8, 4, 1, 64], [8, 1, 4]], "norm_order": ["sandwich"]}),
    *each(ModelConfig, "model.", {"lora_rank": [4], "lora_alpha": [1.0], "lora_targets": [["q_proj"]]}),
    *each(ModelConfig, "model.", {"lora_rank": [0], "lora_alpha": [0], "lora_targets": [[]]}, linear="lora"),
    (ModelConfig, {"linear": "lora", "lora_targets": ["head"]}, "model.lora_targets=head"),
    (ModelConfig, {"d_model": 30, "n_heads": 4}, "model.d_model=30"),
    (ModelConfig, {"n_heads": 4, "n_kv_heads": 3}, "model.n_heads=4"),
    (ModelConfig, {"d_model": 12, "n_heads": 4}, "model.position=rope"),
    *each(HeadConfig, "head.", {"kind": ["twisted"], "embedding_std": [NAN], "embedding_multiplier": [INF]}),
    *each(HeadConfig, "head.", {"head_std": [-0.1], "head_lr_multiplier": [-0.1]}, **UNTIED),
    *each(HeadConfig, "head.", {"untie_at": [-0.1, NAN, 1.01]}, **SPLIT),
    *(
        (HeadConfig, {"kind": kind, **dict.fromkeys({*keys} ^ {key}, 1.0)}, f"head.{key}")  # one less, or one more
        for kind, keys in OWN_SETTINGS.items()
        for key in OWN
    ),
    *each(DataConfig, "data.", {"source": ["cloud"], "seq_len": [0], "batch_size": [0], "overfit_batches": [-1]}),
    *each(DataConfig, "data.", {"val_fraction": [0, 1, NAN], "path": ["my.txt"]}),
    *((DataConfig, {"source": name, "path": path}, "data.path") for name in SOURCES[1:] for path in (None, "")),
    *each(DataConfig, "data.", {"val_split": ["train"], "val_path": ["x"], "sha256": ["x"], "rows": ["words"]}, **HUB),
    *each(DataConfig, "data.", {"val_fraction": [0.2], "val_max_bytes": [None]}, val_split="test", **HUB),
    *each(DataConfig, "data.", {"val_split": ["test"], "val_path": ["a/b"], "rows": ["lines"]}, **FILES),
    (DataConfig, HUB | {"name": ""}, "data.name"),
    (DataConfig, {"source": "json", "path": "a/b", "revision": "v1"}, "data.revision=v1"),
    (DataConfig, {"source": "tokens", "path": "a/b", "max_bytes": 9}, "data.max_bytes=9"),
    *each(TokenizerConfig, "tokenizer.", {"kind": ["words"], "vocab_size": [256, None], "path": ["tokenizer.json"]}),
    *((TokenizerConfig, {"kind": kind}, "tokenizer.vocab_size=2048") for kind in ("char", "byte", "file")),
    (TokenizerConfig, {"kind": "file", "vocab_size": None}, "tokenizer.path"),
    *each(GenerateConfig, "", {"max_new_tokens": [-1], "temperature": [-1, NAN], "threads": [0]}, run_dir="r"),
    *each(GenerateConfig, "", {"seed": [2**63], "n_samples": [0, 2]}, run_dir="r"),
    *each(EvaluateConfig, "", {"threads": [0], "seq_len": [0], "plot": ["a.txt"]}, run_dir="r"),
    (EvaluateConfig, {"run_dir": "r", "data": DataConfig(document_mask=True)}, "data.document_mask=True"),
    (EvaluateConfig, {"run_dir": "r", "data": DataConfig(seq_len=4)}, "data.seq_len=4"),
    (EvaluateConfig, {"run_dir": "r", "data": DataConfig(**HUB, val_split="test")}, "data.val_split=test"),
    (EvaluateConfig, {"run_dir": "r", "data": DataConfig(), "texts": "a"}, "texts=a"),
    *each(ExportConfig, "", {"dtype": ["f16"], "format": ["onnx"]}, run_dir="r", output_dir="o"),
    *each(TrainerConfig, "trainer.", {"accelerator": ["tpu"], "profiler": ["stopwatch"], "precision": ["16-mixed"]}),
    *each(TrainerConfig, "trainer.", {"strategy": ["fsdp"], "gradient_clip_val": [-1.0, NAN]}),
    *each(TrainerConfig, "trainer.", dict.fromkeys(("devices", "num_nodes", "max_steps", "log_every_n_steps"), (0,))),
    *each(TrainerConfig, "trainer.", {"accumulate_grad_batches": [0]}),
    *each(CheckpointConfig, "checkpoint.", {"every": [0], "keep": [0]}),
    *each(ValidationConfig, "validation.", {"every": [-1], "batches": [0]}),
    *each(DiagnosticsConfig, "diagnostics.", {"every": [-1]}),
    *each(OptimConfig, "optim.", {"name": ["sgd"], "decay": ["step"], "decay_fraction": [1.1], "momentum": [0.9]}),
    *each(OptimConfig, "optim.", dict.fromkeys(("lr", "eps", "weight_decay", "final_lr_fraction"), (-1, NAN, 1e300))),
    *each(OptimConfig, "optim.", {"warmup_steps": [-1], "betas": [[], [0.9], [0.9, 1.0], [NAN, 0.9]]}),
    (OptimConfig, {"name": "muon"}, "optim.adam_lr=None"),
    *each(OptimConfig, "optim.", {"ns_steps": [0, 8]}, **asdict(MUON)),
    *each(RunConfig, "", {"max_tokens": [0], "threads": [0], "loss": ["none such"], "seed": [-1, 2**63]}),
    *each(RunConfig, "", {"init_tied_matrix": ["first"]}),
    (RunConfig, {"run_dir": ""}, "run_dir"),
    (RunConfig, {"trainer": TrainerConfig(accumulate_grad_batches=3)}, "trainer.accumulate_grad_batches=3"),
    *((RunConfig, where | MIDTRAINING, "head.kind=untied_midtraining") for where in (TWO, LORA)),
    *((RunConfig, where | EVERY, "diagnostics.every=5") for where in (TWO, LORA)),
    *each(RunConfig, "", {"init_tied_matrix": ["mean"]}, **LORA),
    (RunConfig, LORA | {"trainer": TrainerConfig(precision="bf16-true")}, "trainer.precision=bf16-true"),
]


@pytest.mark.parametrize(("schema", "settings", "start"), REFUSED)
def test_what_cannot_be_is_refused_by_name(schema: type, settings: dict[str, Any], start: str) -> None:
    with pytest.raises(UserError, match=rf"^{re.escape(start)}(?![\w.])") as caught:
        schema(**settings)
    assert "\n" not in str(caught.value)


ALLOWED: list[tuple[type, dict[str, Any]]] = [
    (ModelConfig, {"n_kv_heads": 1, "dropout": 0.0, "residual_scale": 0.0}),
    *((ModelConfig, {"d_model": 12, "n_heads": 4, "position": position}) for position in ("learned", "none")),
    (HeadConfig, UNTIED | {"head_std": 0.0}),
    *((HeadConfig, SPLIT | {"untie_at": value}) for value in (0, 1)),
    *((HeadConfig, {"embedding_multiplier": value}) for value in (None, 0.0, 7.5)),
    (TokenizerConfig, {"vocab_size": 257}),
    (TokenizerConfig, {"kind": "file", "vocab_size": None, "path": "tokenizer.json"}),
    (DataConfig, {"seq_len": 1, "batch_size": 1, "source": "text", "path": "x"}),
    (OptimConfig, {"betas": [0.0, 0.0], "warmup_steps": 0, "decay_fraction": 0.0, "final_lr_fraction": 0.0}),
    (OptimConfig, asdict(MUON) | {"ns_steps": 7}),
    (ValidationConfig, {"every": 0, "batches": None}),
    *((TrainerConfig, {"gradient_clip_val": value}) for value in (0, None)),
    *((TrainerConfig, {"precision": value}) for value in PRECISIONS),
    *((TrainerConfig, {"strategy": value}) for value in STRATEGIES),
    *((RunConfig, TWO | {"head": head}) for name, head in HEADS.items() if name != "untied_midtraining"),
]


@pytest.mark.parametrize(("schema", "settings"), ALLOWED)
def test_the_edge_of_what_can_be_is_allowed(schema: type, settings: dict[str, Any]) -> None:
    values = schema(**settings)
    assert {key: getattr(values, key) for key in settings} == settings
