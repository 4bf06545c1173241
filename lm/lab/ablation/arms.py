"""The arms of an ablation: checked, matched in size, counted, and what a step of each costs here."""

import hashlib
import logging
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch

from lm.config import RunConfig, change, config_hash, flat, user_classes
from lm.data.tokens import TextData, prepare
from lm.errors import UserError, error_prefix, require
from lm.folder import TOKENIZER
from lm.lab.ablation.folder import ArmRecord
from lm.lab.ablation.question import EQUAL_COST, SEED, Question
from lm.lab.init_from.base import read_base
from lm.lab.init_from.weights import copy_weights
from lm.lab.measures.leakage import has_read, scored_text
from lm.lab.measures.speed import seconds_per_step
from lm.lab.user_class import sources_of, try_classes
from lm.model.size import n_params
from lm.model.transformer import Transformer
from lm.system.code import code_identity
from lm.system.files import sha256
from lm.training.resolve import build_model, resolve, with_steps
from lm.training.result import cost_of

STARTUP_SECONDS = 4.0  # of a run, before and after its steps
SIZE_TOLERANCE = 0.01  # how near a matched arm comes to its baseline's number of parameters
log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Arm(ArmRecord):
    """One side of a comparison, ready to run but for the seed, the tuned setting and the directory."""

    name: str
    run: RunConfig
    texts: list[TextData] = field(repr=False)  # of each pair; one, if all pairs share a text

    def text(self, pair: int) -> TextData:
        return self.texts[pair if len(self.texts) > 1 else 0]

    def seconds(self) -> float:
        """Return what a run takes, with the final score, in which a forward pass is a third of a step."""
        n_batches = math.ceil(len(self.texts[0].val) / self.run.tokens_per_step)
        return STARTUP_SECONDS + (self.steps + n_batches / 3) * self.seconds_per_step


Arms = dict[str, Arm]  # by name


def build_arms(
    question: Question,
    folds: Sequence[float | None],
    runs: Mapping[str, RunConfig],
    threads: int,
    earlier: Mapping[str, ArmRecord],
) -> Arms:
    """Return every arm checked, matched and counted; an arm that an `earlier` call has counted is not counted again.

    `folds`: which part of the text each pair holds out; one None if all pairs share a validation text. Raises UserError
    naming the arm to blame.
    """
    arms: Arms = {}
    texts: dict[str, TextData] = {}  # for the arms that share one
    for name in sorted(question.arms, key=lambda name: name in question.match_parameters):  # matched arms last
        with error_prefix(f"ablation.arms.{name}"):
            target = arms[question.pairs()[name]].n_params if name in question.match_parameters else 0
            arm = _build_arm(question, folds, name, runs[name], threads, texts, earlier.get(name), target)
            if path := runs[name].init_from:
                seeds = [question.seed_of(name, seed) for seed in question.seeds]
                for place in dict.fromkeys(path.replace(SEED, str(seed)) for seed in seeds):
                    _check_base(arm, place)
                    arm.bases[place] = read_base(place).sha256
        arms[name] = arm
    arms = {name: arms[name] for name in question.arms}
    _check_distinct(question, arms)
    _check_same_validation_text(question, arms)
    root = arms[question.baseline]
    for arm in arms.values():  # how long each arm trains, so that it spends what the baseline spends
        ratio = 1.0 if question.budget == "tokens" else root.flops_per_token / arm.flops_per_token
        tokens = root.steps * root.tokens_per_step * (ratio if abs(ratio - 1) > EQUAL_COST else 1.0)
        arm.steps = arm.steps if arm is root else max(1, round(tokens / arm.tokens_per_step))
    return arms


def _build_arm(
    question: Question,
    folds: Sequence[float | None],
    name: str,
    run: RunConfig,
    threads: int,
    texts: dict[str, TextData],
    earlier: ArmRecord | None,
    target: int,
) -> Arm:
    if run.trainer.world_size > 1:
        raise UserError("trainer.devices: a run of an ablation trains on one device; several runs go on at a time")
    expected = "true, because a run of an ablation goes on where it was stopped; a new output_dir makes all runs anew"
    require(run.checkpoint.resume, "checkpoint.resume=false", expected)
    trainer = replace(run.trainer, enable_progress_bar=False)
    run = replace(run, threads=run.threads or threads, run_dir=None, trainer=trainer)
    own = list[TextData]()
    for fold in folds:
        data = run.data if fold is None else replace(run.data, fold=fold)
        source = repr((data, run.tokenizer))
        if source not in texts:
            texts[source] = prepare(data, run.tokenizer)
        own.append(texts[source])
    if run.trainer.max_epochs is not None:
        run = with_steps(run, own[0])
    vocab_size = own[0].tokenizer.vocab_size
    matched = match_parameters(run, vocab_size, question.match_parameters[name], target) if target else {}
    run = change(run, matched)
    resolved = resolve(run, vocab_size)
    identity = {
        "data_hash": own[0].hash,
        "tokenizer_hash": own[0].tokenizer.hash,
        "source_hash": code_hash(user_classes(run.model)),
        "device": resolved.trainer.accelerator,
        "precision": resolved.trainer.precision,
    }
    settings = flat(asdict(run) | {"logger": {}})
    if earlier and (earlier.settings, earlier.identity) == (settings, identity):  # counting takes seconds
        size, flops, seconds = earlier.n_params, earlier.flops_per_token, earlier.seconds_per_step
    else:
        if user_classes(run.model):
            try_classes(run, vocab_size)
        cost = cost_of(meta_model(run, vocab_size), run)
        size, flops, seconds = cost["n_params"], cost["flops_per_token"], 0.0
    tuned = question.tuned_setting
    return Arm(
        name=name,
        overrides=question.arms[name],
        run=run,
        texts=own,
        settings=settings,
        matched=matched,
        is_tuned=tuned is not None and bool(settings[tuned]),
        n_params=size,
        flops_per_token=flops,
        tokens_per_step=run.tokens_per_step,
        seconds_per_step=seconds,
        steps=run.steps,
        vocab_size=vocab_size,
        scored_tokens=[text.n_targets for text in own],
        copied=max(text.copied for text in own),
        identity=identity,
    )


def _check_base(arm: Arm, init_from: str) -> None:
    """Raise UserError for a model that a run of the arm cannot start from, or that has read its validation text."""
    base, setting = read_base(init_from), f"init_from={init_from}"
    loaded = base.settings
    is_same = loaded.sha256[TOKENIZER] == sha256(Path(str(arm.run.tokenizer.path)))
    require(is_same, setting, "the tokenizer of the other models of this arm")
    for key, value in asdict(loaded.model).items():
        own = getattr(arm.run.model, key)
        require(base.accepts(key, own), setting, f"model.{key}={own}, as other models of this arm have, not {value}")
    with torch.device("meta"):  # without weights
        net = Transformer(loaded.model, loaded.head, vocab_size=arm.vocab_size, seq_len=loaded.seq_len)
        own_net = Transformer(arm.run.model, arm.run.head, vocab_size=arm.vocab_size, seq_len=arm.run.data.seq_len)
    copy_weights(own_net, net, arm.run.init_tied_matrix)  # for what it refuses
    expected = "a model that has not read the validation text; data.val_path=FILE names another text"
    require(not has_read(base.folder.parent, *scored_text(arm.run, arm.texts[0])), setting, expected)


def _check_distinct(question: Question, arms: Arms) -> None:
    names: dict[tuple[str, int], str] = {}
    tuned = question.tuned_setting or ""
    values = [arm.settings[tuned] for arm in arms.values() if arm.is_tuned]
    for name, arm in arms.items():
        hashes = (arm.identity["data_hash"], arm.identity["tokenizer_hash"])
        same = {tuned: values[0]} if arm.is_tuned else {}  # each arm finds its own value
        key = (config_hash(change(arm.run, same), *hashes), question.seed_offsets.get(name, 0))
        if (other := names.setdefault(key, name)) != name:
            advice = f"for an A/A give one of them seeds of its own (ablation.seed_offsets.{name}=500)"
            if arm.overrides != arms[other].overrides:
                advice = "what they change decides no score"
            if arm.settings.get(tuned) != arms[other].settings.get(tuned):
                advice = f"{tuned} is tuned for each of them; leave tune out"
            raise UserError(f"ablation.arms: {other} and {name} are the same configuration; {advice}")


def _check_same_validation_text(question: Question, arms: Arms) -> None:
    """Losses on different texts, or per token of different tokenizers, are no two measurements of one thing.

    Arms may be trained on different texts where one data.val_path scores them.
    """

    def scored_on(arm: Arm) -> str:
        text = arm.texts[0]
        return text.val_hash or f"{text.hash} {arm.run.data.val_fraction}"

    for name, other in question.pairs().items():
        arm, baseline = arms[name], arms[other]
        if scored_on(arm) != scored_on(baseline):
            reason = f"{name} and {other} would be scored on different validation texts"
            raise UserError(f"ablation.arms: {reason}; one data.val_path=FILE scores both")
        if arm.identity["tokenizer_hash"] != baseline.identity["tokenizer_hash"] and question.metric != "val_bpb":
            reason = f"{name} and {other} have different tokenizers"
            raise UserError(f"ablation.metric={question.metric}: {reason}; choose val_bpb")


# --- the width that gives an arm the parameters of another


def meta_model(run: RunConfig, vocab_size: int) -> Transformer:
    """Return the model of a run on the meta device: shapes without values."""
    with torch.device("meta"):
        return build_model(run, vocab_size)


def match_parameters(run: RunConfig, vocab_size: int, key: str, target: int) -> dict[str, int]:
    """Return the value of the integer setting `key` that brings the run's number of parameters nearest to `target`.

    Raises UserError if that is not within SIZE_TOLERANCE.
    """
    unit = 2 * run.model.n_heads if key == "model.d_model" else 1  # whole heads of even width

    def count(value: int) -> int:
        return n_params(meta_model(change(run, {key: value * unit}), vocab_size))

    high = 2
    while count(high) < target:
        high *= 2
    above = bisect_left(range(high), target, lo=1, key=count)
    best = min((max(above - 1, 1), above), key=lambda value: abs(count(value) - target))
    if abs(count(best) / target - 1) > SIZE_TOLERANCE:
        near = f"{key}={best * unit} gives {count(best):,} parameters, the nearest to {target:,}"
        advice = "a setting that counts for more, as model.d_model" if best == 1 else "a finer setting, as model.d_ff"
        raise UserError(f"ablation.match_parameters: {near}; match by {advice}")
    return {key: best * unit}


def needs_gpu(identity: Mapping[str, str]) -> bool:
    """Return whether runs of an arm with this identity train on a GPU."""
    return identity["device"] in ("cuda", "gpu")


# --- what a training step costs on this machine, for the estimates of a plan


def time_steps(arms: Iterable[Arm]) -> None:
    """Give each arm its seconds per step."""
    log.info("measuring a training step of each arm")
    for arm in arms:
        with error_prefix(f"ablation.arms.{arm.name}"):  # a class of the user may fail
            arm.seconds_per_step = seconds_per_step(resolve(arm.run, arm.vocab_size), arm.texts[0])
        torch.cuda.empty_cache()  # the runs need the memory on a GPU


# --- a hash of the code that the numbers of a run depend on: without comments, docstrings and layout


def code_hash(classes: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a hash of the code of lm that computes, and of the modules of these classes with their local imports.

    `classes` are of the user's own, setting -> dotted path. Raises UserError if such a class has no source file.
    """
    own, sources = code_identity()["hash"], sources_of(classes)
    for module, code in sources.items():
        if code is None:
            raise UserError(f"{', '.join(classes.values())}: {module} has no source file to compare later")
    return own if not sources else hashlib.sha256(repr((own, sources)).encode()).hexdigest()
