"""What settings refuse and allow, which of them make another run, and what the YAML files in configs/ compose to."""

import math
import re
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import HEADS

from lm.cli.arguments import CONFIGS
from lm.cli.compose import compose
from lm.cli.evaluate import EvaluateConfig
from lm.cli.generate import GenerateConfig
from lm.config import (
    HEAD_SETTINGS,
    PRECISIONS,
    REQUESTED,
    SOURCES,
    STRATEGIES,
    TOKENIZERS,
    CheckpointConfig,
    DataConfig,
    DiagnosticsConfig,
    HeadConfig,
    LoggerConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TokenizerConfig,
    TrainerConfig,
    ValidationConfig,
    WandbConfig,
    config_hash,
    deciding_settings,
    flat,
    requested_settings,
    same_run,
)
from lm.config import HEADS as KINDS
from lm.errors import UserError
from lm.lab.ablation.question import AblateConfig
from lm.lab.commands.export import ExportConfig
from lm.training.run_directory import default_directory
from tests.helpers.runs import MUON, change

# --- what settings refuse

NAN, INF = math.nan, math.inf
UNTIED = {"kind": "untied", "head_std": 0.02, "head_lr_multiplier": 1.0}
SPLIT = {"kind": "untied_midtraining", "head_lr_multiplier": 1.0, "untie_at": 0.5}
OWN = sorted({key for keys in HEAD_SETTINGS.values() for key in keys})  # settings that only some kinds of head have
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
        for kind, keys in HEAD_SETTINGS.items()
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
    *each(TrainerConfig, "trainer.", {"accelerator": ["tpu"], "precision": ["16-mixed", "64-true"]}),
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
]


BEST, MINUTES = {"checkpoint": CheckpointConfig(best=True)}, {"max_minutes": 1.0}
PATIENT, NEVER = {"checkpoint": CheckpointConfig(best=True, patience=3)}, {"validation": ValidationConfig(every=0)}
REFUSED += [
    *((RunConfig, BEST | {"validation": ValidationConfig(every=every)}, "checkpoint.best") for every in (0, 1600)),
    *each(RunConfig, "", {"max_minutes": [0.0, INF]}),
    (RunConfig, MINUTES | {"max_tokens": 1000}, "max_tokens=1000 max_minutes=1"),
    (RunConfig, PATIENT | EVERY, "diagnostics.every=5"),
    (RunConfig, {"checkpoint": CheckpointConfig(patience=3)} | NEVER, "checkpoint.patience"),
]
ACCEPTED = "accepted"


def answer(schema: type, settings: dict[str, Any]) -> str:
    try:
        schema(**settings)
    except UserError as error:
        return str(error)
    return ACCEPTED


def test_what_cannot_be_is_refused_in_one_line_that_names_it() -> None:
    for schema, settings, start in REFUSED:
        message = answer(schema, settings)
        assert re.fullmatch(rf"{re.escape(start)}(?![\w.]).*", message), (schema, settings, message)


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


def test_the_edge_of_what_can_be_is_allowed() -> None:
    for schema, settings in ALLOWED:
        assert answer(schema, settings) == ACCEPTED, (schema, settings)


# --- which settings make another run

RUN = RunConfig(data=DataConfig(source="text", path="text.txt"))
FILE = replace(RUN, tokenizer=TokenizerConfig(kind="file", vocab_size=None, path="a.json"))


def with_data(run: RunConfig, **changes: Any) -> RunConfig:
    return replace(run, data=replace(run.data, **changes))


SAME: dict[str, RunConfig] = {
    "threads": replace(RUN, threads=7),
    "logger": replace(RUN, logger=LoggerConfig(wandb=WandbConfig())),
    "checkpoint": replace(RUN, checkpoint=CheckpointConfig(every=3, resume=False)),
    "prompts": replace(RUN, prompts=["x"]),
    "run_dir": replace(RUN, run_dir="elsewhere"),
    "progress bar": change(RUN, enable_progress_bar=False),
    "cache_dir": with_data(RUN, cache_dir="elsewhere"),
    "place of the text": with_data(RUN, path="/data/other.txt"),
    "length in tokens": replace(RUN, max_tokens=1600 * 8 * 128 - 1),
    "label": replace(RUN, head=replace(RUN.head, name="mine")),
    "logging": change(RUN, log_every_n_steps=3),
    "validation": replace(RUN, validation=ValidationConfig(every=7, batches=None)),
    "diagnostics": replace(RUN, diagnostics=DiagnosticsConfig(every=5)),
    "pin and bounds of the text": with_data(RUN, sha256="0" * 64, max_bytes=10**9, val_max_bytes=None),
}
TRAINER: dict[str, Any] = {"max_steps": 99, "precision": "32-true", "accelerator": "cpu", "strategy": "ddp"}
TRAINER |= {"max_epochs": 2.0, "devices": 2, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
OF_DATA: dict[str, Any] = {"order": "documents", "val_fraction": 0.2, "seq_len": 64, "batch_size": 4}
OF_DATA |= {"document_mask": True, "overfit_batches": 1, "fold": 0}
OTHER: dict[str, RunConfig] = {  # the key that differs -> a run
    "seed": replace(RUN, seed=1),
    "optim.lr": replace(RUN, optim=OptimConfig(lr=1.0)),
    "optim.lr_scale": replace(RUN, optim=OptimConfig(lr_scale=2.0)),
    "loss": replace(RUN, loss="plain"),
    "loss_temperature": replace(RUN, loss_temperature=0.5),
    "ngram_smoothing": replace(RUN, ngram_smoothing=0.5),
    "compile": replace(RUN, compile=True),
    "activation_checkpointing": replace(RUN, compile=True, activation_checkpointing=True),
    "head.kind": replace(RUN, head=HEADS["untied"]),
    "checkpoint.best": replace(RUN, checkpoint=CheckpointConfig(best=True)),
    "checkpoint.patience": replace(RUN, checkpoint=CheckpointConfig(patience=3)),
    "max_minutes": replace(RUN, max_minutes=1.0),
    "init_sha256": replace(RUN, init_sha256="00"),
    "init_tied_matrix": replace(RUN, init_tied_matrix="mean"),
    **{f"trainer.{key}": change(RUN, **{key: value}) for key, value in TRAINER.items()},
    **{f"data.{key}": with_data(RUN, **{key: value}) for key, value in OF_DATA.items()},
}


def test_the_hash_is_of_what_changes_the_numbers() -> None:
    expected = config_hash(RUN, "text", "tokenizer")
    assert [name for name, run in SAME.items() if config_hash(run, "text", "tokenizer") != expected] == []
    others = {config_hash(run, "text", "tokenizer") for run in OTHER.values()}
    others |= {config_hash(RUN, "other", "tokenizer"), config_hash(RUN, "text", "other")}
    assert len(others - {expected}) == len(OTHER) + 2
    best = [
        replace(RUN, checkpoint=CheckpointConfig(best=True), validation=ValidationConfig(every=n)) for n in (100, 50)
    ]
    assert config_hash(best[0]) != config_hash(best[1]), "validation chooses the model"
    assert config_hash(change(RUN, devices=2)) == config_hash(change(RUN, num_nodes=2)), "two processes"
    assert len({config_hash(replace(RUN, compile=False, activation_checkpointing=on)) for on in (False, True)}) == 1
    elsewhere = replace(FILE, tokenizer=replace(FILE.tokenizer, path="b.json"))
    assert config_hash(FILE, "text", "tokenizer") == config_hash(elsewhere, "text", "tokenizer")


def test_every_setting_decides_numbers_or_is_known_not_to() -> None:
    run = replace(RUN, checkpoint=CheckpointConfig(best=True), loss_temperature=0.5, ngram_smoothing=0.5)
    rest = {key for key in {*flat(asdict(run))} - {*deciding_settings(asdict(run))} if key.split(".")[0] != "tokenizer"}
    of_text = {f"data.{key}" for key in asdict(run.data)} - {f"data.{key}" for key in OF_DATA}
    where = {"run_dir", "init_from", "threads", "activation_checkpointing", "other_code"}
    logged = {"prompts", "logger.tensorboard", "logger.wandb", "diagnostics.every", "head.name", "max_tokens"}
    logged |= {f"checkpoint.{key}" for key in ("every", "keep", "resume")}
    logged |= {f"trainer.{key}" for key in ("log_every_n_steps", "enable_progress_bar", "detect_anomaly")}
    assert rest == of_text | where | logged


def saved(run: RunConfig, **decided: Any) -> dict[str, Any]:
    """The content of config.yaml of a run for which `decided` was left open."""
    requested = {key: flat(asdict(run))[key] for key in REQUESTED}
    content = asdict(run) | {"requested": requested}
    for key, value in decided.items():
        group, _, name = key.rpartition("__")
        (content[group] if group else content)[name] = value
    return content


def test_what_differs_is_named() -> None:
    named = {key: same_run(saved(RUN), requested_settings(run)) for key, run in OTHER.items()}
    assert [key for key, keys in named.items() if key not in keys] == []
    assert [
        key for key, run in SAME.items() if same_run(saved(RUN), requested_settings(run)) not in ([], ["threads"])
    ] == []
    cpu, cuda, gpu = (change(RUN, accelerator=device, threads=1) for device in ("cpu", "cuda", "gpu"))
    assert same_run(saved(cpu), requested_settings(replace(cpu, threads=2))) == ["threads"]
    assert same_run(saved(cuda), requested_settings(replace(cuda, threads=2))) == []
    assert same_run(saved(cuda), requested_settings(gpu)) == []
    assert same_run(saved(cpu), requested_settings(gpu)) == ["trainer.accelerator"], (
        "a run on a CPU is not taken for it"
    )


def test_what_was_left_open_agrees_with_the_request_and_with_the_decision() -> None:
    decided = saved(RUN, trainer__accelerator="cpu", trainer__precision="32-true", loss="plain", threads=2)
    typed = replace(change(RUN, accelerator="cpu", precision="32-true"), loss="plain", threads=2)
    for run in (RUN, typed):
        assert same_run(decided, requested_settings(run)) == []
    assert same_run(decided, requested_settings(replace(RUN, loss="chunked"))) == ["loss"]
    timed = replace(RUN, max_minutes=2.0)
    content = saved(timed, trainer__max_steps=77, max_minutes=None)
    assert same_run(content, requested_settings(timed)) == []
    assert same_run(content, requested_settings(replace(timed, max_minutes=3.0))) == ["max_minutes"]
    assert same_run(content, requested_settings(change(RUN, max_steps=77))) == []


@pytest.mark.parametrize("lengths", [{"max_tokens": 9, "max_minutes": 1.0}, {"max_tokens": 9, "max_epochs": 1.0}])
def test_a_run_has_one_length(lengths: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="expected one length"):
        change(RUN, **lengths)


def test_a_directory_is_named_by_the_run_and_found_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = replace(RUN, head=HeadConfig(name="a/b c"), seed=3)
    moved = with_data(run, path="/data/other.txt")
    path = default_directory(run, "0123456789abcdef")
    assert str(path) == "runs/text-bpe2048-4x128-a_b_c-seed3-01234567"
    assert default_directory(moved, "0123456789abcdef") != path
    path.mkdir(parents=True)
    assert default_directory(moved, "0123456789abcdef") == path
    assert default_directory(moved, "9999999999999999") != path


# --- configs/

FILES = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "lm_eval")  # these are lm-eval's
DEFAULTS = yaml.safe_load((CONFIGS / "train.yaml").read_text())["defaults"]
DEFAULT = {group: choice for entry in DEFAULTS if isinstance(entry, dict) for group, choice in entry.items()}


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def choose(group: str, choice: str) -> list[str]:
    """A choice, with a value for each key that its file leaves to the user."""
    content = yaml.safe_load((CONFIGS / group / f"{choice}.yaml").read_text()) or {}
    return [f"{group}={choice}", *(f"{group}.{key}=some/path" for key, value in content.items() if value == "???")]


@cache
def train(*overrides: str) -> RunConfig:
    return compose("train", overrides, RunConfig)


@pytest.mark.slow
def test_every_choice_composes() -> None:
    """The i-th of every group together; an experiment, which chooses of several groups, by itself and shorter."""
    groups = {group: choices(group) for group in DEFAULT if group != "experiment" and "@" not in group}
    for i in range(max(map(len, groups.values()))):
        chosen = {group: names[i % len(names)] for group, names in groups.items()}
        run = train(*(override for group, name in chosen.items() for override in choose(group, name)))
        assert run.head.name in chosen["head"]
    for name in choices("experiment"):
        assert train(*choose("experiment", name), "trainer.max_steps=100").steps == 100


CONTINUES = {"continue_untied", "lora_rank"}  # a model of each seed that is trained before: tests/test_bases.py
TWICE = {"cs336", "own_text", "tying_core", "untie_when"}  # tests/test_published.py composes these as well
ONCE = [name for name in choices("ablation") if name not in TWICE | CONTINUES]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ONCE, *(pytest.param(name, marks=pytest.mark.nightly) for name in sorted(TWICE))])
def test_every_arm_of_every_ablation_composes(name: str) -> None:
    ablation = compose("ablate", [f"ablation={name}", "ablation.name=as-hydra-says"], AblateConfig).ablation
    assert ablation.question.endswith("?")
    for arm in ablation.arms.values():
        train(*ablation.overrides, *arm)


def test_every_file_opens_with_the_command_that_uses_it() -> None:
    for path in FILES:
        if path.stem == "quiet":
            continue
        command = next(line for line in path.read_text().splitlines() if not line.startswith("# @package"))
        script = re.match(r"# .*(scripts/\w+\.py)", command)
        assert script, path
        assert (CONFIGS.parent / script[1]).is_file(), path
        is_default = path.parent == CONFIGS or path.stem == DEFAULT.get(path.parent.name)
        is_default |= path.parent.name == "rates"  # chosen by the optimizer and the head
        assert f"{path.parent.name}={path.stem}" in command or is_default, path


def test_every_name_of_the_schemas_has_a_config_and_every_group_can_be_chosen() -> None:
    for group, names in {"data": SOURCES, "tokenizer": TOKENIZERS, "optim": ("adamw", "muon"), "head": KINDS}.items():
        assert {*names} <= {*choices(group)}
    assert {path.parent.name for path in FILES if path.parent != CONFIGS} <= {*DEFAULT, "ablation", "rates"}


def test_a_global_choice_changes_no_more_than_it_says() -> None:
    debug = train("trainer=debug", "model.d_model=32")
    assert (debug.steps, debug.model.d_model) == (20, 32), "the command line wins"
    assert (debug.trainer.gradient_clip_val, debug.tokenizer) == (1.0, TokenizerConfig())
