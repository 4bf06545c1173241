"""The arms of an ablation: checked, matched and counted. Nothing is trained here."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import torch

from lm.ablation.plan.match import change, match_parameters, meta_model
from lm.ablation.plan.source import source_files, source_hash
from lm.ablation.record import AblationRecord, ArmRecord
from lm.config import BadInput, HeadConfig, ModelConfig, RunConfig, foreign_classes
from lm.config.ablation import AblationConfig
from lm.config.checks import about
from lm.config.identity import config_hash, flat
from lm.data.tokens import TextData, prepare
from lm.formats.base import read_base
from lm.model.size import flops_per_token, n_params
from lm.model.transformer import Transformer
from lm.training.init_from import copy_weights
from lm.training.optim import step_flops
from lm.training.resolve import n_batches, resolve


@dataclass(slots=True, kw_only=True)
class Arm(ArmRecord):
    """One side of a comparison, ready to run but for the seed, the number of steps and the directory."""

    name: str
    run: RunConfig
    sources: dict[str, str]  # file of the training code -> hash
    start: Callable[[int], dict[str, Any]] = lambda seed: {}  # settings by seed: the run that this one starts from
    cells: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def seconds(self, steps: int) -> float:
        """What a run of so many steps takes, with the final score, in which a forward pass is a third of a step."""
        return (steps + n_batches(self.run, self.val_tokens) / 3) * self.seconds_per_step

    def record(self) -> ArmRecord:
        return ArmRecord(**{one.name: getattr(self, one.name) for one in fields(ArmRecord)})


Arms = dict[str, Arm]  # by name


def sources_of(arms: Arms) -> dict[str, str]:
    return {file: value for arm in arms.values() for file, value in arm.sources.items()}


def build_arms(
    config: AblationConfig,
    runs: dict[str, RunConfig],
    threads: int,
    quiet: bool = True,
    known: Mapping[str, ArmRecord] = MappingProxyType({}),
) -> Arms:
    """Every arm checked, matched and counted, but for those that are `known` from an earlier call and unchanged.

    Raises BadInput naming the culprit.
    """
    texts: dict[str, TextData] = {}
    arms: Arms = {}
    for name in sorted(config.arms, key=lambda name: name in config.match_parameters):  # after their baselines
        run = as_cell(runs[name], threads)
        with about(f"ablation.arms.{name}"):
            source = repr((run.data, run.tokenizer))
            if source not in texts:
                texts[source] = prepare(run.data, run.tokenizer, quiet)
            arm = build_arm(name, config.arms[name], run, texts[source], known.get(name))
            if key := config.match_parameters.get(name):
                value = match_parameters(run, arm.vocab_size, key, arms[config.contrasts()[name]].n_params)
                arm = build_arm(name, config.arms[name], change(run, value), texts[source], known.get(name))
                arm.matched = value
        arms[name] = arm
        if run.init_from:
            loaded = read_base(run.init_from).settings
            check_start(arm, loaded.model, loaded.head, loaded.seq_len)
    arms = {name: arms[name] for name in config.arms}
    refuse_twins(config, arms)
    refuse_other_texts(config, arms)
    return arms


def common_threads(before: AblationRecord, runs: Iterable[RunConfig]) -> int:
    """Of every run that does not say its own: the most that one says at the first call, and the same at later ones."""
    said = [before.threads] if before.begun else [run.threads for run in runs if run.threads]
    return max(said, default=1)


def as_cell(run: RunConfig, threads: int) -> RunConfig:
    trainer = replace(run.trainer, enable_progress_bar=False)
    return replace(run, threads=run.threads or threads, run_dir=None, trainer=trainer)


def build_lone_arm(name: str, words: list[str], run: RunConfig, threads: int, quiet: bool) -> Arm:
    """One that is compared with no other."""
    run = as_cell(run, threads)
    return build_arm(name, words, run, prepare(run.data, run.tokenizer, quiet))


def check_start(arm: Arm, model: ModelConfig, head: HeadConfig, seq_len: int) -> None:
    """Raise BadInput if the arm cannot start from such a model. On the meta device, so weights are not needed."""
    with about(f"ablation.arms.{arm.name}"):
        with torch.device("meta"):
            loaded = Transformer(model, head, vocab_size=arm.vocab_size, seq_len=seq_len)
        copy_weights(meta_model(arm.run, arm.vocab_size), loaded, arm.run.init_tied_matrix)


def build_arm(name: str, words: list[str], run: RunConfig, data: TextData, known: ArmRecord | None = None) -> Arm:
    resolved = resolve(run, data.tokenizer.vocab_size)
    if run.trainer.world_size > 1:
        raise BadInput("trainer.devices: a run of an ablation trains on one device; several runs go on at a time")
    sources = source_files(foreign_classes(run.model))
    tokens, settings = run.tokens_per_step, flat(asdict(run) | {"logger": {}})
    identity = {  # what decides a run's numbers beside its configuration
        "data_hash": data.hash,
        "tokenizer_hash": data.tokenizer.hash,
        "source_hash": source_hash(sources),
        "device": resolved.trainer.accelerator,
        "precision": resolved.trainer.precision,
    }
    if known and (known.settings, known.identity) == (settings, identity):  # counting again takes seconds
        size, flops = known.n_params, known.flops_per_token
    else:
        net = meta_model(run, data.tokenizer.vocab_size)
        size, flops = n_params(net), flops_per_token(net) + step_flops(net, run.optim, run.head) // tokens
    return Arm(
        name=name,
        words=words,
        run=run,
        settings=settings,
        vocab_size=data.tokenizer.vocab_size,
        train_tokens=len(data.train),
        val_tokens=len(data.val),
        sources=sources,
        identity=identity,
        tokens_per_step=tokens,
        n_params=size,
        flops_per_token=flops,
        steps={"own": run.steps},
    )


def refuse_twins(config: AblationConfig, arms: Arms) -> None:
    seen: dict[tuple[str, int], str] = {}
    for name, arm in arms.items():
        key = (config_hash(change(arm.run, {"head.name": ""})), config.seed_offsets.get(name, 0))
        if key in seen:
            own = f"for an A/A give one of them seeds of its own (ablation.seed_offsets.{name}=500)"
            raise BadInput(f"ablation.arms: {seen[key]} and {name} are the same configuration; {own}")
        seen[key] = name


def refuse_other_texts(config: AblationConfig, arms: Arms) -> None:
    """Losses on different texts, or per token of different tokenizers, are no two measurements of one thing."""
    for name, other in config.contrasts().items():
        one, two = arms[name], arms[other]
        texts = [(arm.identity["data_hash"], arm.run.data.val_fraction) for arm in (one, two)]
        if texts[0] != texts[1]:
            raise BadInput(f"ablation.arms: {name} and {other} would be scored on different validation texts")
        if one.identity["tokenizer_hash"] != two.identity["tokenizer_hash"] and config.metric != "val_bpb":
            both = f"{name} and {other} have different tokenizers"
            raise BadInput(f"ablation.metric={config.metric}: {both}; choose val_bpb")
