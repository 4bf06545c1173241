"""The arms of an ablation: checked, matched in size, counted, and what a step of each costs here."""

import ast
import hashlib
import importlib.util
import logging
import math
import sys
import sysconfig
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch

import lm
from lm.config import RunConfig, config_hash, deciding_settings, flat, foreign_classes
from lm.data.tokens import TextData, prepare
from lm.errors import UserError, error_prefix, require
from lm.folder import read_base
from lm.lab.ablation.record import ArmRecord
from lm.lab.ablation.settings import AblationConfig
from lm.model.size import flops_per_token, n_params
from lm.model.transformer import Transformer
from lm.model.user_class import import_class
from lm.system.code import code_identity, code_of
from lm.training.init_from import check_start
from lm.training.optim import step_flops
from lm.training.resolve import build_model, resolve, step_timer, with_steps

STARTUP_SECONDS = 4.0  # of a run, before and after its steps
EQUAL_COST = 0.02  # FLOPs of a token that differ by less count as equal
SIZE_TOLERANCE = 0.01  # how near a matched arm comes to its baseline's number of parameters


@dataclass(slots=True, kw_only=True)
class Arm(ArmRecord):
    """One side of a comparison, ready to run but for the seed, the number of steps and the directory."""

    name: str
    run: RunConfig
    val_hash: str  # of the text that it is scored on

    def seconds(self, steps: int) -> float:
        """What a run of so many steps takes, with the final score, in which a forward pass is a third of a step."""
        return (
            STARTUP_SECONDS
            + (steps + math.ceil(self.val_tokens / self.run.tokens_per_step) / 3) * self.seconds_per_step
        )


Arms = dict[str, Arm]  # by name


def build_arms(
    config: AblationConfig,
    runs: dict[str, RunConfig],
    threads: int,
    earlier: Mapping[str, ArmRecord],
    texts: dict[str, TextData],
) -> Arms:
    """Every arm checked, matched and counted, but for those that are unchanged since an `earlier` call.

    `texts` keeps what is prepared. Raises UserError naming the arm to blame.
    """
    arms: Arms = {}
    for name in sorted(config.arms, key=lambda name: name in config.match_parameters):  # after their baselines
        with error_prefix(f"ablation.arms.{name}"):
            arm = build_arm(name, config.arms[name], runs[name], threads, texts, earlier.get(name))
            if key := config.match_parameters.get(name):
                matched = match_parameters(arm, key, arms[config.pairs()[name]].n_params)
                run = change(runs[name], matched)
                arm = build_arm(name, config.arms[name], run, threads, texts, earlier.get(name))
                arm.matched = matched
        arms[name] = arm
        if runs[name].init_from:
            loaded = read_base(str(runs[name].init_from)).settings
            with error_prefix(f"ablation.arms.{name}"):
                check_start(arm.run, arm.vocab_size, loaded.model, loaded.head, loaded.seq_len)
    arms = {name: arms[name] for name in config.arms}
    _check_distinct(config, arms)
    _check_same_validation_text(config, arms)
    return arms


def build_arm(
    name: str,
    overrides: list[str],
    run: RunConfig,
    threads: int,
    texts: dict[str, TextData],
    earlier: ArmRecord | None = None,
) -> Arm:
    """`texts` keeps what is prepared, for the arms that share it."""
    if run.trainer.world_size > 1:
        raise UserError("trainer.devices: a run of an ablation trains on one device; several runs go on at a time")
    expected = "true, for a run of an ablation goes on where it was stopped; an empty output_dir makes all of them anew"
    require(run.checkpoint.resume, "checkpoint.resume=false", expected)
    trainer = replace(run.trainer, enable_progress_bar=False)
    run = replace(run, threads=run.threads or threads, run_dir=None, trainer=trainer)
    source = repr((run.data, run.tokenizer))
    if source not in texts:
        texts[source] = prepare(run.data, run.tokenizer, quiet=not sys.stderr.isatty())
    text = texts[source]
    if run.trainer.max_epochs is not None:
        run = with_steps(run, text)
    resolved = resolve(run, text.tokenizer.vocab_size)
    identity = {
        "data_hash": text.hash,
        "tokenizer_hash": text.tokenizer.hash,
        "source_hash": code_hash(foreign_classes(run.model)),
        "device": resolved.trainer.accelerator,
        "precision": resolved.trainer.precision,
    }
    settings = flat(asdict(run) | {"logger": {}})
    seconds, steps = earlier.seconds_per_step if earlier else 0.0, run.steps
    if earlier and (earlier.settings, earlier.identity) == (settings, identity):  # counting again takes seconds
        size, flops = earlier.n_params, earlier.flops_per_token
    else:
        net = meta_model(run, text.tokenizer.vocab_size)
        size = n_params(net)
        flops = flops_per_token(net) + step_flops(net, run.optim, run.head) // run.tokens_per_step
    if run.max_minutes and earlier and deciding_settings(earlier.settings) == deciding_settings(settings):
        steps = earlier.steps["own"]  # other timings would give the runs other names
    return Arm(
        name=name,
        overrides=overrides,
        run=run,
        val_hash=text.val_hash or f"{text.hash} {run.data.val_fraction}",
        settings=settings,
        vocab_size=text.tokenizer.vocab_size,
        val_tokens=len(text.val),
        copied=text.copied if text.val_hash else 0.0,
        identity=identity,
        tokens_per_step=run.tokens_per_step,
        n_params=size,
        flops_per_token=flops,
        seconds_per_step=seconds,
        steps={"own": steps},
    )


def _check_distinct(config: AblationConfig, arms: Arms) -> None:
    names: dict[tuple[str, int], str] = {}
    for name, arm in arms.items():
        hashes = (arm.identity["data_hash"], arm.identity["tokenizer_hash"])
        key = (config_hash(change(arm.run, {"head.name": ""}), *hashes), config.seed_offsets.get(name, 0))
        if key in names:
            advice = f"for an A/A give one of them seeds of its own (ablation.seed_offsets.{name}=500)"
            raise UserError(f"ablation.arms: {names[key]} and {name} are the same configuration; {advice}")
        names[key] = name


def _check_same_validation_text(config: AblationConfig, arms: Arms) -> None:
    """Losses on different texts, or per token of different tokenizers, are no two measurements of one thing.

    Arms may be trained on different texts where one data.val_path scores them.
    """
    for name, other in config.pairs().items():
        arm, baseline = arms[name], arms[other]
        if arm.val_hash != baseline.val_hash:
            reason = f"{name} and {other} would be scored on different validation texts"
            raise UserError(f"ablation.arms: {reason}; one data.val_path=FILE scores both")
        if arm.identity["tokenizer_hash"] != baseline.identity["tokenizer_hash"] and config.metric != "val_bpb":
            reason = f"{name} and {other} have different tokenizers"
            raise UserError(f"ablation.metric={config.metric}: {reason}; choose val_bpb")


# --- settings changed by name, and the width that gives an arm the parameters of another


def change(run: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The run with dotted keys set; checked as if they had been typed."""
    groups: dict[str, dict[str, Any]] = {"": {}}
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        groups.setdefault(group, {})[name] = value
    own = groups.pop("")
    return replace(run, **own, **{group: replace(getattr(run, group), **changes) for group, changes in groups.items()})


def meta_model(run: RunConfig, vocab_size: int) -> Transformer:
    """Return the model of a run on the meta device: shapes without values."""
    with torch.device("meta"):
        return build_model(run, vocab_size)


def match_parameters(arm: Arm, key: str, target: int) -> dict[str, int]:
    """The value of the integer setting `key` with which the arm's number of parameters comes nearest to `target`.

    Raises UserError if that is not within SIZE_TOLERANCE.
    """
    unit = 2 * arm.run.model.n_heads if key == "model.d_model" else 1  # whole heads of even width

    def count(value: int) -> int:
        return n_params(meta_model(change(arm.run, {key: value * unit}), arm.vocab_size))

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


# --- what a training step costs on this machine, for the estimates of a plan


ROUNDS = 5  # of a measurement
log = logging.getLogger(__name__)


def time_steps(arms: Iterable[Arm]) -> None:
    """Give each arm its seconds per step: the median of a few, after one that warms up."""
    log.info("measuring a training step of each arm")
    for arm in arms:
        resolved = resolve(arm.run, arm.vocab_size)
        step = step_timer(resolved, arm.vocab_size, arm.val_tokens)
        step()
        arm.seconds_per_step = median(step() for _ in range(ROUNDS))


def set_steps(config: AblationConfig, arms: Arms) -> None:
    """How long each arm trains, so that it spends what the arm it is compared with spends."""
    for name, arm in arms.items():
        root = arms[config.root(name)]
        tokens = root.steps["own"] * root.tokens_per_step / arm.tokens_per_step
        ratio = 1.0 if config.budget == "tokens" else root.flops_per_token / arm.flops_per_token
        arm.steps[config.budget] = max(1, round(tokens * (ratio if abs(ratio - 1) > EQUAL_COST else 1)))


# --- a hash of the code that a run's numbers depend on: without comments, docstrings and layout


def code_hash(classes: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a hash of the code of lm that computes, and of the modules of these classes with their local imports.

    `classes` are of the user's own, setting -> dotted path. An import is local if it lies neither in
    the standard library nor where packages are installed. Raises UserError if such a class has no
    source file.
    """
    own = code_identity()["hash"]
    files = dict[str, Path]()
    for key, dotted in classes.items():
        module = import_class(key, dotted).__module__
        for name in {module, dotted.rpartition(".")[0]}:
            if _source(name) is None:
                raise UserError(f"{key}={dotted}: {name} has no source file, so its changes could not be noticed")
            files |= _local_imports(name)
    if not files:
        return own
    sources = {name: code_of(path.read_text(encoding="utf-8")) for name, path in sorted(files.items())}
    return hashlib.sha256(repr((own, sources)).encode()).hexdigest()


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path}: {error}; expected Python") from error


def _local_imports(module: str) -> dict[str, Path]:
    """The source files of a module and of all local modules that it imports, directly or not, by name."""
    ahead, files = [module], dict[str, Path]()
    while ahead:
        name = ahead.pop()
        if name not in files and (path := _source(name)) and (name == module or _is_local(name)):
            files[name] = path
            package = name if path.stem == "__init__" else name.rpartition(".")[0]
            ahead += _imported_names(_parse(path), package)
    return files


def _imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Modules, the packages around them, and what is taken from them, which may be modules too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
        else:
            continue
        for parts in (name.split(".") for name in names):
            yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))


def _source(module: str) -> Path | None:
    with suppress(ImportError, ValueError, AttributeError):  # also where the name is no module
        spec = importlib.util.find_spec(module)
        return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None
    return None


def _is_local(module: str) -> bool:
    path = _source(module)
    if (
        path is None
        or path.is_relative_to(sysconfig.get_path("stdlib"))
        or path.is_relative_to(Path(lm.__file__).parent)
    ):
        return False
    return not {"site-packages", "dist-packages"} & {*path.parts}
