"""train(run) is the composition root: from a configuration to a finished run directory."""

import logging
import os
import platform
import sys
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer

from lm.callbacks import Journal
from lm.checkpoint import Checkpoints
from lm.config import RunConfig
from lm.data import TextData, prepare
from lm.device import set_threads
from lm.evaluate import evaluate
from lm.metrics import MetricsFile
from lm.model.size import flops_per_token, n_params, n_params_by_role
from lm.model.transformer import Transformer
from lm.portable import save_model
from lm.run import RunDirectory, config_hash, default_dir
from lm.task import LMTask
from lm.trainer import build_loggers, build_trainer

PACKAGES = ("torch", "lightning", "hydra-core", "tokenizers", "datasets", "numpy", "safetensors")
log = logging.getLogger(__name__)


def run_directory(run: RunConfig) -> Path:
    return Path(run.run_dir).expanduser() if run.run_dir else default_dir(run)


def train(run: RunConfig) -> dict[str, Any]:
    """Train one run, or finish it, or read the result it already has. Returns the content of result.json.

    Raises BadInput for what the user can mend (nothing is left behind, nothing of an earlier run is touched) and
    Interrupted after a signal; the same call then goes on where it stopped.
    """
    quiet = not sys.stderr.isatty() or not run.trainer.get("enable_progress_bar", True)
    place, threads = RunDirectory(run_directory(run)), set_threads(run.threads)
    data = prepare(run.data, run.tokenizer, quiet)
    settings = asdict(run) | {"run_dir": str(place.path), "threads": threads, "data_hash": data.hash}
    finished = place.read_result()
    if finished is not None:
        place.refuse_changes(settings)
        log.info("%s is finished: nothing to train", place.path)
        return finished
    with place.claim() if leads() else nullcontext():
        return fit(run, place, settings, data, quiet)


def leads() -> bool:
    """Whether this process is the first of its job: the one that writes."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))) == 0


def fit(run: RunConfig, place: RunDirectory, settings: dict[str, Any], data: TextData, quiet: bool) -> dict[str, Any]:
    checkpoints = Checkpoints(place.checkpoints, run.checkpoint.keep)
    resume = checkpoints.newest() if run.checkpoint.resume else None
    if resume:
        place.refuse_changes(settings)
        log.info("resuming %s from %s", place.path, resume.name)
    net = Transformer(
        run.model, run.head, vocab_size=data.tokenizer.vocab_size, seq_len=run.data.seq_len, seed=run.seed
    )
    trainer, journal = build_trainer(run, place.path, checkpoints, quiet)
    others = build_loggers(run, place.path)
    if run.compile:
        net.compile()
    if leads():
        place.write_config(settings)
        for old in checkpoints.found() if not run.checkpoint.resume else ():
            checkpoints.remove_checkpoint(old)
    if trainer.is_global_zero:
        trainer.loggers = [MetricsFile(place.metrics, step_of(resume)), *others]
        log.info("%s: %s parameters, %s steps", place.path, f"{n_params(net):,}", f"{trainer.max_steps:,}")
    task = LMTask(net, run, data, trainer.max_steps)
    try:
        trainer.fit(task, ckpt_path=resume, weights_only=True)
    except BaseException:
        if journal.signum is not None and trainer.is_global_zero:
            save_model(net, data.tokenizer, place.model)  # so that an interrupted run can be tried
        raise
    if not trainer.is_global_zero:
        return {}
    save_model(net, data.tokenizer, place.model)
    result = summarise(run, settings, net, data, trainer, journal, quiet)
    place.write_result(result)
    return result


def step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.name.split("-")[1]) if checkpoint else 0


def summarise(
    run: RunConfig,
    settings: dict[str, Any],
    net: Transformer,
    data: TextData,
    trainer: Trainer,
    journal: Journal,
    quiet: bool,
) -> dict[str, Any]:
    """The content of result.json: what was reached, what it cost, and what is needed to do it again."""
    seconds, device = journal.seconds, trainer.strategy.root_device
    net.to(device)  # Lightning takes it off when it ends
    scores = evaluate(net, data.val, run.data.seq_len, run.data.batch_size, bar=not quiet)
    tokens = trainer.global_step * journal.tokens_per_step
    return {
        "val_loss": scores.loss,
        "val_bpb": scores.bits_per_byte(data.val_bytes),
        "val_top1": scores.top1,
        "val_tokens": scores.n_tokens,
        "baselines_bpb": data.baselines,
        "n_params": n_params(net),
        "n_params_by_role": n_params_by_role(net),
        "flops_per_token": flops_per_token(net),
        "steps": trainer.global_step,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "seed": run.seed,
        "head": run.head.name,
        "resumed_from": journal.resumed_from,
        "config_hash": config_hash(run),
        "data_hash": data.hash,
        "tokenizer_hash": data.tokenizer.hash,
        "threads": settings["threads"],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "precision": str(trainer.precision),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
    }
