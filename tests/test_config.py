"""What settings refuse and allow, which of them make another run, and what the YAML files in configs/ compose to."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from lm.cli.arguments import CONFIGS, parse
from lm.cli.compose import compose
from lm.cli.evaluate import EvaluateConfig
from lm.cli.generate import GenerateConfig
from lm.config import (
    HEADS,
    OPTIMIZER_SETTINGS,
    REQUESTED,
    SOURCES,
    TOKENIZERS,
    TYPED_LENGTHS,
    DataConfig,
    LoggerConfig,
    RunConfig,
    TensorBoardConfig,
    TokenizerConfig,
    WandbConfig,
    build,
    config_hash,
    deciding_settings,
    differing_keys,
    flat,
    requested_settings,
)
from lm.errors import UserError
from lm.lab.ablation.question import AblateConfig
from lm.lab.commands.export import ExportConfig
from lm.training.run_directory import default_directory
from scripts.pages.configuration import COMMANDS
from tests.helpers.ablation_folder import write_run_dir


def run_of(*lines):
    """The run with the settings that the lines type, each word as YAML."""
    groups = {}
    for word in " ".join(lines).split():
        key, _, value = word.partition("=")
        group, _, name = key.rpartition(".")
        groups.setdefault(group, {})[name] = yaml.safe_load(value)
    own = groups.pop("", {})
    example = RunConfig()
    return RunConfig(**own, **{group: type(getattr(example, group))(**values) for group, values in groups.items()})


def key_of(line):
    """The key of the last word of a line."""
    return line.split()[-1].partition("=")[0]


def lines(table):
    return [line.strip() for line in table.strip().splitlines()]


# --- what settings refuse

REFUSED = """
    model.n_layers=0
    model.d_model=0
    model.n_heads=0
    model.n_kv_heads=0
    model.d_head=0
    model.d_ff=0
    model.d_ff=100000000000000000000
    model.vocab_rows=0
    model.dropout=-0.1
    model.dropout=1.0
    model.dropout=.nan
    model.residual_scale=-0.1
    model.rope_theta=0
    model.rope_theta=.nan
    model.norm_eps=0
    model.norm_order=sandwich
    model.attention_bias=v
    model.linear=other
    model.ffn=a.b-c
    model.position=absolute
    model.position=none model.previous_token_init=1
    model.position=none model.rope_scaling=[8,1,4,64]
    model.norm=none model.previous_token_init=1
    model.norm=none model.qk_norm=true
    model.rope_scaling=[8,4,1,64]
    model.rope_scaling=[8,1,4]
    model.lora_rank=4
    model.lora_alpha=1.0
    model.lora_targets=[q_proj]
    model.linear=lora model.lora_rank=0
    model.linear=lora model.lora_alpha=0
    model.linear=lora model.lora_targets=[]
    model.linear=lora model.lora_targets=[head]
    model.n_heads=4 model.d_model=30
    model.n_kv_heads=3 model.n_heads=4
    model.d_model=12 model.n_heads=4 -> model.position
    head.kind=twisted
    head.embedding_std=.nan
    head.embedding_multiplier=.inf
    head.embedding_lr_multiplier=-1
    head.head_std=0.1
    head.untie_at=0.5
    head.kind=untied head.head_lr_multiplier=1 -> head.head_std
    head.kind=untied head.head_std=0.1 -> head.head_lr_multiplier
    head.kind=untied head.head_lr_multiplier=1 head.head_std=-0.1
    head.kind=untied head.head_std=0.1 head.head_lr_multiplier=-0.1
    head.kind=untied head.head_std=0.1 head.head_lr_multiplier=1 head.untie_at=0.5
    head.kind=tied_projected head.head_lr_multiplier=1 head.head_std=0.1
    head.kind=untied_from_embedding -> head.head_lr_multiplier
    head.kind=untied_midtraining head.head_lr_multiplier=1 -> head.untie_at
    head.kind=untied_midtraining head.head_lr_multiplier=1 head.untie_at=-0.1
    head.kind=untied_midtraining head.head_lr_multiplier=1 head.untie_at=.nan
    head.kind=untied_midtraining head.head_lr_multiplier=1 head.untie_at=1.01
    data.source=cloud
    data.order=random
    data.seq_len=0
    data.batch_size=0
    data.max_bytes=0
    data.val_max_bytes=3
    data.overfit_batches=-1
    data.fold=-1
    data.fold=10
    data.fold=0.3
    data.val_fraction=0
    data.val_fraction=1
    data.val_fraction=.nan
    data.path=my.txt
    data.source=text -> data.path
    data.source=hub -> data.path
    data.source=hub data.path=a/b data.rows=words
    data.source=hub data.path=a/b data.name=''
    data.source=hub data.path=a/b data.sha256=x
    data.source=hub data.path=a/b data.val_path=x
    data.source=hub data.path=a/b data.val_split=train
    data.source=hub data.path=a/b data.val_split=test data.val_fraction=0.2
    data.source=hub data.path=a/b data.val_split=test data.val_max_bytes=null
    data.source=text data.path=a/b data.val_split=test
    data.source=text data.path=a/b data.val_path=a/b
    data.source=text data.path=a/b data.val_path=c data.fold=0
    data.source=text data.path=a/b data.rows=lines
    data.source=text data.path=a/b data.separator=x data.sha256=x data.max_bytes=9
    data.source=json data.path=a/b data.revision=v1
    data.source=tokens data.path=a/b data.max_bytes=9
    tokenizer.kind=words
    tokenizer.vocab_size=256
    tokenizer.vocab_size=null
    tokenizer.path=tokenizer.json
    tokenizer.kind=char -> tokenizer.vocab_size
    tokenizer.kind=file tokenizer.vocab_size=null -> tokenizer.path
    optim.name=sgd
    optim.decay=step
    optim.lr=-1
    optim.lr=.nan
    optim.lr=1.0e+300
    optim.lr_scale=-1
    optim.eps=-1
    optim.weight_decay=-1
    optim.final_lr_fraction=-1
    optim.warmup_steps=-1
    optim.decay_fraction=-0.1
    optim.decay_fraction=1.1
    optim.decay=constant optim.decay_fraction=0.2 -> optim.decay_fraction
    optim.decay=constant optim.final_lr_fraction=0.1 -> optim.final_lr_fraction
    optim.betas=[]
    optim.betas=[0.9]
    optim.betas=[0.9,1.0]
    optim.betas=[.nan,0.9]
    optim.ema=1
    optim.momentum=0.9
    optim.name=muon -> optim.adam_lr
    optim.name=muon optim.ns_steps=4 optim.momentum=0.9 optim.adam_lr=-1
    optim.name=muon optim.adam_lr=0.1 optim.ns_steps=4 optim.momentum=1
    optim.name=muon optim.adam_lr=0.1 optim.momentum=0.9 optim.ns_steps=0
    optim.name=muon optim.adam_lr=0.1 optim.momentum=0.9 optim.ns_steps=8
    trainer.accelerator=tpu
    trainer.precision=16-mixed
    trainer.strategy=fsdp
    trainer.devices=0
    trainer.num_nodes=0
    trainer.max_steps=0
    trainer.max_epochs=0
    trainer.log_every_n_steps=0
    trainer.accumulate_grad_batches=0
    trainer.accumulate_grad_batches=3
    trainer.gradient_clip_val=-1
    trainer.gradient_clip_val=.nan
    checkpoint.every=0
    checkpoint.keep=0
    checkpoint.patience=0
    checkpoint.best=true validation.every=0 -> checkpoint.best
    checkpoint.best=true validation.every=1600 -> checkpoint.best
    checkpoint.patience=3 validation.every=0 -> checkpoint.patience
    checkpoint.patience=3 diagnostics.every=5
    validation.every=-1
    validation.batches=0
    diagnostics.every=-1
    seed=-1
    seed=9223372036854775808
    loss=other
    loss_temperature=0
    ngram_smoothing=1.1
    threads=0
    run_dir=''
    init_tied_matrix=first
    model.linear=lora init_tied_matrix=mean
    model.linear=lora diagnostics.every=5
    trainer.devices=2 diagnostics.every=5
    trainer.devices=2 head.head_lr_multiplier=1 head.untie_at=0.5 head.kind=untied_midtraining
    max_tokens=0
    max_minutes=0
    max_minutes=.inf
    max_minutes=1 max_tokens=9 -> max_tokens
    max_tokens=9 trainer.max_epochs=1
"""
FLAT = {
    GenerateConfig: """
        max_new_tokens=-1
        temperature=-1
        temperature=.nan
        threads=0
        seed=9223372036854775808
        top=0
        n_samples=0
        n_samples=2
    """,
    EvaluateConfig: """
        threads=0
        seq_len=0
    """,
    ExportConfig: """
        output_dir=o dtype=f16
        output_dir=o format=onnx
        output_dir=o title=mine
        run_dir=r -> output_dir
    """,
}


def refusal(build, *given, **settings):
    """The line about settings, or that they are accepted."""
    try:
        build(*given, **settings)
    except UserError as error:
        return str(error)
    return "accepted"


def names(message, line):
    """Whether a message is one line that begins with the key behind the arrow, or with that of the last word."""
    key = line.partition(" -> ")[2] or key_of(line)
    return re.fullmatch(rf"{re.escape(key)}\b(?!\.).*", message) is not None


def test_what_cannot_be_is_refused_in_one_line_that_names_it():
    for line in lines(REFUSED):
        message = refusal(run_of, line.partition(" -> ")[0])
        assert names(message, line), (line, message)
    for schema, table in FLAT.items():
        for line in lines(table):
            message = refusal(parse, schema, line.partition(" -> ")[0].split())
            assert names(message, line), (line, message)
    assert refusal(EvaluateConfig, data=DataConfig(), texts="a").startswith("texts=a: ")


ALLOWED = """
    model.n_kv_heads=1 model.dropout=0 model.residual_scale=0
    model.d_model=12 model.n_heads=4 model.position=learned
    head.kind=untied head.head_lr_multiplier=1 head.head_std=0
    head.kind=untied_midtraining head.head_lr_multiplier=1 head.untie_at=0
    head.kind=untied_midtraining head.head_lr_multiplier=1 head.untie_at=1
    head.embedding_multiplier=null
    head.embedding_multiplier=0
    tokenizer.vocab_size=257
    tokenizer.kind=file tokenizer.vocab_size=null tokenizer.path=tokenizer.json
    data.seq_len=1 data.batch_size=1 data.source=text data.path=x
    data.fold=9 data.val_max_bytes=4
    data.fold=0.5
    optim.betas=[0,0] optim.warmup_steps=0 optim.decay_fraction=0 optim.final_lr_fraction=0
    optim.name=muon optim.adam_lr=0.1 optim.momentum=0 optim.ns_steps=7
    validation.every=0 validation.batches=null
    trainer.gradient_clip_val=0
    trainer.gradient_clip_val=null trainer.precision=bf16-mixed trainer.strategy=ddp
    trainer.devices=2 head.kind=untied head.head_std=0.1 head.head_lr_multiplier=1
"""


def test_the_edge_of_what_can_be_is_allowed():
    assert {line: answer for line in lines(ALLOWED) if (answer := refusal(run_of, line)) != "accepted"} == {}


PATHS = [  # settings, and those of them that are paths
    (run_of(), "run_dir init_from"),
    (DataConfig(source="text", path="x"), "path val_path"),
    (TokenizerConfig(kind="file", vocab_size=None, path="x"), "path"),
    (WandbConfig(), "dir"),
    (COMMANDS["generate"], "run_dir prompt_file"),
    (COMMANDS["evaluate"], "run_dir texts"),
    (COMMANDS["export"], "run_dir output_dir"),
    (COMMANDS["runs"], "folder csv plot"),
    (COMMANDS["look"], "run_dir folder"),
    (COMMANDS["ablate"], "output_dir confirm"),
    (COMMANDS["report"], "run_dir"),
]


def test_the_home_folder_stands_for_its_sign_in_every_path(monkeypatch):
    """A name like that of a user whom nobody knows is a name."""
    monkeypatch.setenv("HOME", "/some/home")
    for config, keys in PATHS:
        for key in keys.split():
            assert getattr(replace(config, **{key: "~/a.svg"}), key) == "/some/home/a.svg"
            assert getattr(replace(config, **{key: "~nobody-at-all/a.svg"}), key) == "~nobody-at-all/a.svg"


# --- which settings make another run

TEXT = "data.source=text data.path=text.txt"
RUN = run_of(TEXT)
SAME = """
    threads=7
    prompts=[x]
    run_dir=elsewhere
    init_from=elsewhere
    other_code=true
    activation_checkpointing=true
    max_tokens=1638399
    head.name=mine
    checkpoint.every=3
    checkpoint.keep=3
    checkpoint.resume=false
    validation.every=7
    validation.batches=null
    diagnostics.every=5
    trainer.log_every_n_steps=3
    trainer.enable_progress_bar=false
    trainer.detect_anomaly=true
    data.path=/data/other.txt
    data.cache_dir=elsewhere
    data.sha256=0
    data.max_bytes=1000000000
    data.val_max_bytes=null
    data.separator=x
    data.path=a/b data.source=hub
    data.source=hub data.name=x
    data.source=hub data.revision=x
    data.source=hub data.split=x
    data.source=hub data.column=x
    data.source=hub data.rows=lines
    tokenizer.vocab_size=999
    tokenizer.vocab_size=null tokenizer.kind=byte
    tokenizer.kind=file tokenizer.vocab_size=null tokenizer.path=a.json
"""
TRACKED = replace(RUN, logger=LoggerConfig(wandb=WandbConfig(), tensorboard=TensorBoardConfig()))
OTHER = """
    seed=1
    loss=plain
    loss_temperature=0.5
    ngram_smoothing=0.5
    compile=true
    compile=true activation_checkpointing=true
    max_minutes=1.0
    init_sha256=x
    init_tied_matrix=mean
    optim.lr=1.0
    optim.lr_scale=2.0
    head.embedding_std=1
    head.head_std=0.01 head.head_lr_multiplier=1 head.kind=untied
    checkpoint.patience=3
    validation.every=100 checkpoint.best=true
    validation.every=50 checkpoint.best=true
    trainer.max_steps=99
    trainer.max_epochs=2
    trainer.devices=2
    trainer.strategy=ddp
    trainer.precision=32-true
    trainer.accelerator=cpu
    trainer.gradient_clip_val=0.5
    trainer.accumulate_grad_batches=2
    data.order=documents
    data.val_fraction=0.2
    data.fold=0
    data.seq_len=64
    data.batch_size=4
    data.document_mask=true
    data.overfit_batches=1
"""


def hash_of(line):
    return config_hash(run_of(TEXT, line), "text", "tokenizer")


def test_the_hash_is_of_what_changes_the_numbers():
    expected = hash_of("")
    assert [line for line in lines(SAME) if hash_of(line) != expected] == []
    assert config_hash(TRACKED, "text", "tokenizer") == expected
    others = {hash_of(line) for line in lines(OTHER)}
    others |= {config_hash(RUN, "other", "tokenizer"), config_hash(RUN, "text", "other")}
    assert len(others - {expected}) == len(lines(OTHER)) + 2
    assert hash_of("trainer.devices=2") == hash_of("trainer.num_nodes=2"), "two processes"


def test_every_setting_decides_numbers_or_is_known_not_to():
    settings = asdict(RUN)
    known = {key_of(line) for line in lines(SAME)} | {"logger.tensorboard", "logger.wandb"}
    known |= {"data.val_path", "data.val_split"}  # whose text the hash of the data stands for
    assert {*flat(settings)} - {*deciding_settings(settings)} == known


def saved(asked, decided=""):
    """The content of config.yaml of a run of which the machine or the text has decided something."""
    before = flat(asdict(run_of(TEXT, asked)))
    return asdict(run_of(TEXT, asked, decided)) | {"requested": {key: before[key] for key in REQUESTED}}


DECIDED = "trainer.accelerator=cpu trainer.precision=32-true loss=plain threads=2"
TIMED = "max_minutes=null trainer.max_steps=77"
CONTINUED = [  # what was asked, what was decided, what is asked now, which keys differ
    ("trainer.accelerator=cpu threads=1", "", "trainer.accelerator=cpu threads=2", ["threads"]),
    ("trainer.accelerator=cuda threads=1", "", "trainer.accelerator=cuda threads=2", []),
    ("trainer.accelerator=cuda", "", "trainer.accelerator=gpu", []),
    ("trainer.accelerator=cpu", "", "trainer.accelerator=gpu", ["trainer.accelerator"]),
    ("", DECIDED, "", []),
    ("", DECIDED, DECIDED, []),
    ("", DECIDED, "loss=chunked", ["loss"]),
    ("max_minutes=2", TIMED, "max_minutes=2", []),
    ("max_minutes=2", TIMED, "max_minutes=3", ["length"]),
    ("max_minutes=2", TIMED, "trainer.max_steps=77", []),
    ("max_minutes=2", TIMED, "", ["length"]),  # another length was asked for
]


def test_what_differs_is_named_and_what_was_left_open_agrees_with_the_request_and_with_the_decision():
    for line in lines(OTHER):
        key = "length" if key_of(line) in TYPED_LENGTHS else key_of(line)
        assert key in differing_keys(saved(""), requested_settings(run_of(TEXT, line))), line
    for asked, decided, now, differing in CONTINUED:
        assert differing_keys(saved(asked, decided), requested_settings(run_of(TEXT, now))) == differing, (asked, now)


def test_a_directory_is_named_by_the_run_and_found_by_its_hash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = run_of(TEXT, "head.name=a/b seed=3")
    moved = run_of("data.source=text data.path=/data/other.txt head.name=a/b seed=3")
    path = default_directory(run, "0123456789abcdef")
    assert str(path) == "runs/text-bpe2048-4x128-a_b-seed3-01234567"
    assert default_directory(moved, "0123456789abcdef") != path
    path.mkdir(parents=True)
    assert default_directory(run, "0123456789abcdef") == default_directory(moved, "0123456789abcdef") == path
    assert default_directory(moved, "9999999999999999") != path
    Path("-texts").mkdir()
    monkeypatch.chdir("-texts")
    for pattern in (".", "'*.txt'", "../-texts/**/*.txt"):
        name = default_directory(run_of(f"data.source=text data.path={pattern}"), "0123456789abcdef").name
        assert name.startswith("texts-bpe"), "a name that no program takes for a flag"


# --- configs/

DEFAULTS = yaml.safe_load((CONFIGS / "train.yaml").read_text())["defaults"]
DEFAULT = {group: choice for entry in DEFAULTS if isinstance(entry, dict) for group, choice in entry.items()}


def choices(group):
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def choose(group, choice):
    """A choice, with a value for each key that its file leaves to the user."""
    content = yaml.safe_load((CONFIGS / group / f"{choice}.yaml").read_text()) or {}
    return [f"{group}={choice}", *(f"{group}.{key}=some/path" for key, value in content.items() if value == "???")]


@pytest.mark.slow
def test_every_choice_composes():
    """The i-th of every group together; an experiment, which chooses of several groups, by itself and shorter."""
    groups = {group: choices(group) for group in DEFAULT if group != "experiment" and "@" not in group}
    for i in range(max(map(len, groups.values()))):
        chosen = {group: names[i % len(names)] for group, names in groups.items()}
        words = [word for group, name in chosen.items() for word in choose(group, name)]
        assert compose("train", words, RunConfig).head.name in chosen["head"]
    for name in choices("experiment"):
        words = [*choose("experiment", name), "trainer.max_steps=100"]
        assert compose("train", words, RunConfig).steps == 100


CONTINUES = {"continue_untied", "lora_rank"}  # a model of each seed that is trained before: tests/test_plan.py


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in choices("ablation") if name not in CONTINUES])
def test_every_arm_of_every_ablation_composes(name):
    ablation = compose("ablate", [f"ablation={name}", "ablation.name=as-hydra-says"], AblateConfig).ablation
    assert ablation.question.endswith("?")
    for arm in ablation.arms.values():
        compose("train", [*ablation.overrides, *arm], RunConfig)


def test_every_name_of_the_schemas_has_a_config():
    for group, names in {"data": SOURCES, "tokenizer": TOKENIZERS, "optim": OPTIMIZER_SETTINGS, "head": HEADS}.items():
        assert {*names} <= {*choices(group)}


def test_text_of_a_file_stays_as_it_is(tmp_path):
    """In Hydra's YAML ${key} stands for a setting; in what a run has recorded it is text, as in a name or a prompt."""
    for text in ("a ${b}.txt", "${oc.env:HOME}", "\\${seed}", "${", "the ${cat"):
        assert build(DataConfig, {"source": "text", "path": text}).path == text
        write_run_dir(tmp_path / "run", RunConfig(data=DataConfig(source="text", path=text), prompts=[text]))
        run = compose("train", [f"run_dir={tmp_path}/run", "checkpoint.keep=3"], RunConfig)
        assert (Path(str(run.data.path)).name, run.prompts, run.checkpoint.keep) == (text, [text], 3)
