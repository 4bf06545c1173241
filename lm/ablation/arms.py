"""The arms of an ablation: composed, checked, matched and counted. Nothing is trained here."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lm.ablation.config import AblationConfig
from lm.ablation.source import source_hash
from lm.config import BadInput, RunConfig
from lm.data import TextData, prepare
from lm.model.size import flops_per_token, n_params
from lm.model.transformer import Transformer
from lm.run import config_hash
from lm.trainer import resolve, tokens_per_step

Compose = Callable[[list[str]], RunConfig]  # overrides of train.py to a configuration
SAME_SIZE = 0.01  # how near a matched arm comes to its baseline's parameters
OURS = {
    "seed": "the seeds of an ablation are ablation.seeds=[...]",
    "run_dir": "each run of an ablation has a directory of its own below output_dir",
}
BUDGETED = "an arm trains as long as its budget allows; it may stand among the overrides of all arms"
NOT_AN_ARM = OURS | {"trainer.max_steps": BUDGETED, "max_tokens": BUDGETED}


@dataclass(slots=True, kw_only=True)
class Arm:
    """One side of a comparison, ready to run but for the seed, the number of steps and the directory."""

    name: str
    words: list[str]
    run: RunConfig
    vocab_size: int
    train_tokens: int
    val_tokens: int
    identity: dict[str, str]  # hashes of what decides a run beside its configuration
    tokens_per_step: int
    n_params: int
    flops_per_token: int
    seconds_per_step: float = 0.0
    matched: dict[str, int] = field(default_factory=dict)  # what the program chose to match the baseline's parameters
    tuned: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)  # by budget

    def seconds(self, steps: int) -> float:
        """What a run of so many steps takes, validation included: a forward pass is a third of a step."""
        validation, batches = self.run.validation, -(-self.val_tokens // self.tokens_per_step)
        passes = steps // validation.every * min(validation.batches or batches, batches) if validation.every else 0
        return (steps + (passes + batches) / 3) * self.seconds_per_step


def build_arms(
    config: AblationConfig, words: list[str], compose: Compose, threads: int, quiet: bool = True
) -> dict[str, Arm]:
    """Every arm composed, checked, matched and counted. Raises BadInput naming the culprit."""
    common = {key_of(word): word for word in [*config.overrides, *words]}
    for key in common.keys() & set(OURS):
        raise BadInput(f"{common[key]}: {OURS[key]}")
    texts: dict[str, TextData] = {}
    arms: dict[str, Arm] = {}
    for name in sorted(config.arms, key=lambda name: name in config.match):  # what is matched comes after its baseline
        own = {key_of(word): word for word in config.arms[name]}
        try:
            for key in own.keys() & set(NOT_AN_ARM):
                raise BadInput(f"{own[key]}: {NOT_AN_ARM[key]}")
            for key in own.keys() & set(map(key_of, words)):
                raise BadInput(f"{own[key]}: is what this arm is about; leave {common[key]} out")
            run = compose(list((common | own).values()))
            run.threads, run.run_dir = run.threads or threads, None
            run.trainer["enable_progress_bar"] = False
            source = repr((run.data, run.tokenizer))
            if source not in texts:
                texts[source] = prepare(run.data, run.tokenizer, quiet)
            arm = build_arm(name, config.arms[name], run, texts[source])
            if name in config.match:
                value = match_parameters(arm, config.match[name], arms[config.contrasts()[name]].n_params)
                arm = build_arm(name, config.arms[name], change(run, value), texts[source])
                arm.matched = value
        except BadInput as error:
            raise BadInput(f"ablation.arms.{name}: {error}") from error
        arms[name] = arm
    arms = {name: arms[name] for name in config.arms}
    refuse_twins(config, arms)
    return arms


def key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def build_arm(name: str, words: list[str], run: RunConfig, data: TextData) -> Arm:
    options = resolve(run)
    if options["devices"] * options["num_nodes"] > 1:
        raise BadInput("trainer.devices: a cell of an ablation trains on one device; several cells run at a time")
    net = ghost(run, data.tokenizer.vocab_size)
    return Arm(
        name=name,
        words=words,
        run=run,
        vocab_size=data.tokenizer.vocab_size,
        train_tokens=len(data.train),
        val_tokens=len(data.val),
        identity={"data_hash": data.hash, "tokenizer_hash": data.tokenizer.hash, "source_hash": source_hash()},
        tokens_per_step=tokens_per_step(run, options),
        n_params=n_params(net),
        flops_per_token=flops_per_token(net),
        steps={"own": options["max_steps"]},
    )


def ghost(run: RunConfig, vocab_size: int) -> Transformer:
    """The model without memory."""
    with torch.device("meta"):
        return Transformer(run.model, run.head, vocab_size=vocab_size, seq_len=run.data.seq_len)


def match_parameters(arm: Arm, key: str, target: int) -> dict[str, int]:
    """The value of the integer setting `key` with which the arm's parameters come nearest to `target`.

    Raises BadInput if that is not within SAME_SIZE.
    """
    unit = 2 * arm.run.model.n_heads if key == "model.d_model" else 1  # whole heads of even width

    def count(value: int) -> int:
        return n_params(ghost(change(arm.run, {key: value * unit}), arm.vocab_size))

    low, high = 1, 2
    while count(high) < target:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < target else (low, middle)
    best = min((low, high), key=lambda value: abs(count(value) - target))
    if abs(count(best) / target - 1) > SAME_SIZE:
        near = f"{key}={best * unit} gives {count(best):,} parameters"
        raise BadInput(f"ablation.match: {near}, the nearest to {target:,}; match by a finer setting (model.d_ff)")
    return {key: best * unit}


def change(run: RunConfig, values: dict[str, Any]) -> RunConfig:
    """The run with dotted keys set; checked as if they had been typed."""
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        run = replace(run, **({group: replace(getattr(run, group), **{name: value})} if group else {name: value}))
    return run


def refuse_twins(config: AblationConfig, arms: dict[str, Arm]) -> None:
    seen: dict[tuple[str, int], str] = {}
    for name, arm in arms.items():
        key = (config_hash(change(arm.run, {"head.name": ""})), config.reseed.get(name, 0))
        if key in seen:
            raise BadInput(
                f"ablation.arms: {seen[key]} and {name} are the same configuration;"
                f" for an A/A give one of them seeds of its own (ablation.reseed.{name}=1000)"
            )
        seen[key] = name
