"""train(run) is the composition root: from a configuration to a finished run directory."""

import logging
import math
import platform
import sys
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.utilities import rank_zero_only

from lm.config import BadInput, Diverged, RunConfig
from lm.config.identity import config_hash
from lm.data.tokens import TextData, prepare
from lm.exchange.portable import save_model
from lm.inference.decode import generate
from lm.inference.evaluate import evaluate
from lm.model.activation_checkpointing import enable_activation_checkpointing
from lm.model.size import flops_per_token, n_params, n_params_by_role
from lm.model.transformer import Transformer
from lm.system.device import is_mixed, quick_attention, set_threads
from lm.training.callbacks import TrainingCallback
from lm.training.checkpoint import Checkpoints
from lm.training.loss import build_loss, which_loss
from lm.training.metrics import Lines, MetricsFile
from lm.training.optim import LOW, peak_factor, step_flops
from lm.training.run_directory import RunDirectory, default_dir
from lm.training.task import LMTask
from lm.training.trainer import build_loggers, build_trainer, resolve

PACKAGES = ("torch", "lightning", "hydra-core", "tokenizers", "datasets", "numpy", "safetensors")
log = logging.getLogger(__name__)


def run_directory(run: RunConfig) -> Path:
    return Path(run.run_dir).expanduser() if run.run_dir else default_dir(run)


def train(run: RunConfig, data: TextData | None = None) -> dict[str, Any]:
    """Train one run, or finish it, or read the result it already has. Returns the content of result.json.

    `data` is what `prepare` gives for this run, if the caller has called it.

    Raises BadInput for what the user can mend (nothing is left behind, nothing of an earlier run is touched) and
    Interrupted after a signal; the same call then goes on where it stopped.
    """
    bar = sys.stderr.isatty() and bool(run.trainer.get("enable_progress_bar", True))
    options, place, threads = resolve(run), RunDirectory(run_directory(run)), set_threads(run.threads)
    data = data or prepare(run.data, run.tokenizer, quiet=not bar)
    settings = asdict(run) | {
        "run_dir": str(place.path),
        "threads": threads,
        "device": options["accelerator"],
        "precision": options["precision"],
        "data_hash": data.hash,
        "tokenizer_hash": data.tokenizer.hash,
    }
    finished = place.read_result()
    if finished is None:
        with place.claim() if leads() else nullcontext():
            finished = place.read_result()  # by another process, while this one waited
            if finished is None:
                return fit(run, options, place, settings, data, bar and leads())
    place.refuse_changes(settings, but=("threads", "device", "precision", "loss"))
    log.info("%s is finished: nothing to train", place.path)
    if run.logger:
        log.info("loggers hear of a run while it trains: of this one they are told nothing")
    if run.prompts is not None:
        log.info("prompts are continued when a run ends; for this one: scripts/generate.py run_dir=%s", place.path)
    return finished


def leads() -> bool:
    """Whether this process is the first of its job: the one that writes."""
    return int(getattr(rank_zero_only, "rank", 0)) == 0


def fit(
    run: RunConfig, options: dict[str, Any], place: RunDirectory, settings: dict[str, Any], data: TextData, bar: bool
) -> dict[str, Any]:
    checkpoints = Checkpoints(place.checkpoints, run.checkpoint.keep)
    resume = checkpoints.newest() if run.checkpoint.resume else None
    net = Transformer(
        run.model, run.head, vocab_size=data.tokenizer.vocab_size, seq_len=run.data.seq_len, seed=run.seed
    )
    device, mixed = options["accelerator"], is_mixed(options["precision"])
    settings |= {"loss": which_loss(run.loss, net, device, run.compile, mixed)}
    if checkpoints.found():  # also of those that are to go: they may be another run's
        place.refuse_changes(settings)
    if resume:
        log.info("resuming %s from %s", place.path, resume.name)
    trainer, callback = build_trainer(run, options, checkpoints, place.path, bar)
    others = build_loggers(run, place.path)
    if run.activation_checkpointing:
        enable_activation_checkpointing(net)
    if leads():
        for old in checkpoints.found() if not run.checkpoint.resume else ():
            checkpoints.remove_checkpoint(old)
        place.write_config(settings)
        first, shown = step_of(resume), run.trainer.get("enable_progress_bar", True)
        lines = [Lines(first, trainer.max_steps)] if shown else []
        trainer.loggers = [MetricsFile(place.metrics, first), *lines, *others]
        log.info("%s: %s parameters, %s steps", place.path, f"{n_params(net):,}", f"{trainer.max_steps:,}")
        if (peak := peak_factor(trainer.max_steps, run.optim)) < LOW:
            log.warning("optim.warmup_steps is long for so short a run: it reaches about %.0f %% of lr", 100 * peak)
    task = LMTask(net, run, data, trainer.max_steps, build_loss(settings["loss"], run.compile))
    try:
        with callback.listening(), quick_attention(device, mixed, run.data.seq_len):
            trainer.fit(task, ckpt_path=resume, weights_only=True)
    except BaseException:
        if callback.signum is not None and leads():
            save_model(net, data.tokenizer, place.model)  # so that an interrupted run can be tried
        raise
    if not leads():
        return {}
    result = summarise(run, settings, net, data, trainer, callback, bar)
    if not math.isfinite(result["val_loss"]):
        raise Diverged(f"the validation loss is {result['val_loss']}: lower optim.lr={run.optim.lr} or clip gradients")
    save_model(net, data.tokenizer, place.model)
    place.write_result(result)
    return result


def step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.name.split("-")[1]) if checkpoint else 0


def samples(net: Transformer, data: TextData, prompts: list[str] | None) -> list[dict[str, str]]:
    """Greedy continuations of the prompts; without any, of three places in the validation text."""
    if prompts is None:
        places = (len(data.val) * quarter // 4 for quarter in (1, 2, 3))
        texts = (data.tokenizer.decode(data.val[place : place + 64].tolist()) for place in places)
        prompts = [(text.partition("\n")[2] or text)[:60] for text in texts]  # from where a line begins
    found = []
    for prompt in prompts:
        try:
            found.append({"prompt": prompt, "continuation": generate(net, data.tokenizer, prompt, 48)})
        except BadInput as error:
            log.warning("no continuation of %r: %s", prompt, error)
    return found


def summarise(
    run: RunConfig,
    settings: dict[str, Any],
    net: Transformer,
    data: TextData,
    trainer: Trainer,
    callback: TrainingCallback,
    bar: bool,
) -> dict[str, Any]:
    """The content of result.json: what was reached, what it cost, and what is needed to do it again."""
    seconds, device = callback.seconds, trainer.strategy.root_device
    net.to(device)  # Lightning takes it off when it ends
    scores = evaluate(net, data.val, run.data.seq_len, run.data.batch_size, bar=bar)
    tokens = trainer.global_step * callback.tokens_per_step
    return {
        "val_loss": scores.loss,
        "val_bpb": scores.bits_per_byte(data.val_bytes),
        "val_top1": scores.top1,
        "val_tokens": scores.n_tokens,
        "baselines_bpb": data.baselines,
        "n_params": n_params(net),
        "n_params_by_role": n_params_by_role(net),
        "flops_per_token": flops_per_token(net) + step_flops(net, run.optim, run.head) // callback.tokens_per_step,
        "steps": trainer.global_step,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "seed": run.seed,
        "head": run.head.name,
        "resumed_from": callback.resumed_from,
        "config_hash": config_hash(run),
        "data_hash": data.hash,
        "tokenizer_hash": data.tokenizer.hash,
        "threads": settings["threads"],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "precision": str(trainer.precision),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "samples": samples(net, data, run.prompts),
    }
