"""train(run), the entry point of training: from a configuration to a finished run directory."""

import logging
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lm.config import BadInput, Diverged, RunConfig
from lm.config.identity import config_hash
from lm.config.run import AUTO
from lm.data.tokens import TextData, prepare
from lm.exchange.adapter import merged, save_adapter
from lm.exchange.portable import save_model
from lm.model.size import flops_per_token, n_params, n_params_by_role, n_params_trained
from lm.system.device import fast_attention, is_mixed, set_threads
from lm.system.processes import is_first_process
from lm.system.waiting import adaptive_waiting
from lm.training.checkpoint import Checkpoints
from lm.training.init_from import load_base, with_hash
from lm.training.loggers import build_loggers, log_result, with_settings
from lm.training.loss import build_loss, resolve_loss
from lm.training.metrics import ConsoleLogger, MetricsFile
from lm.training.model import build_model
from lm.training.optim import MIN_PEAK_LR_FACTOR, peak_lr_factor, step_flops
from lm.training.options import resolve, tokens_per_step
from lm.training.result import build_result, final_score
from lm.training.run_directory import RunDirectory, default_dir
from lm.training.task import LMTask
from lm.training.threads import auto_threads
from lm.training.trainer import build_trainer

CHUNK = 1 << 22  # tokens read at a time
log = logging.getLogger(__name__)


def run_directory(run: RunConfig) -> Path:
    return Path(run.run_dir).expanduser() if run.run_dir else default_dir(run)


def train(run: RunConfig, data: TextData | None = None) -> dict[str, Any]:
    """Train a run, or resume it, or read the result of a finished one. Returns the content of result.json.

    `data` is the result of `prepare` for this run, if the caller has it already.

    Raises BadInput for what the user can correct. Before training starts this leaves no new directory behind and
    changes no earlier run; after that (Diverged, or no compiler for compile=true) the directory remains.
    Raises Interrupted after a signal; the same call then resumes the run.
    """
    run = with_hash(run)
    bar = sys.stderr.isatty() and bool(run.trainer.get("enable_progress_bar", True))
    options, directory = resolve(run), RunDirectory(run_directory(run))
    finished = directory.read_result()
    given = run.threads if isinstance(run.threads, int) else None
    threads = given if finished else set_threads(given)  # it may have been made on a machine with more cores
    data = data or prepare(run.data, run.tokenizer, quiet=not bar)
    settings = asdict(run) | {
        "run_dir": str(directory.path),
        "threads": threads,
        "device": options["accelerator"],
        "precision": options["precision"],
        "config_hash": config_hash(run),
        "data_hash": data.hash,
        "data_revision": data.revision,
        "tokenizer_hash": data.tokenizer.hash,
    }
    if finished is None:
        with directory.claim() if is_first_process() else nullcontext():
            finished = directory.read_result()  # another process may have finished it meanwhile
            if finished is None:
                if run.threads == AUTO:
                    settings["threads"] = auto_threads(run, directory, data.tokenizer.vocab_size)
                with adaptive_waiting(settings["threads"]):
                    return fit(run, options, directory, settings, data, bar and is_first_process())
    directory.refuse_changes(settings, but=("threads", "device", "precision", "loss"))
    log.info("%s is finished: nothing to train", directory.path)
    if run.logger:
        log.info("loggers record a run while it trains, so this run is not sent to them")
    if run.prompts is not None:
        log.info("prompts are continued when a run ends; now use generate with run_dir=%s", directory.path)
    return finished


def fit(
    run: RunConfig,
    options: dict[str, Any],
    directory: RunDirectory,
    settings: dict[str, Any],
    data: TextData,
    bar: bool,
) -> dict[str, Any]:
    net = build_model(run, data.tokenizer.vocab_size, data.tokenizer.eot)
    device, mixed = options["accelerator"], is_mixed(options["precision"])
    settings |= {"loss": resolve_loss(run.loss, net, device, run.compile, mixed)}
    identity = {
        "seed": run.seed,
        "data_hash": data.hash,
        "config_hash": config_hash(replace(run, loss=settings["loss"])),
    }
    checkpoints = Checkpoints(directory.checkpoints, run.checkpoint.keep, identity)
    if checkpoints.paths():  # with checkpoint.resume=false, too: they may be those of another run
        directory.refuse_changes(settings)
    resume = checkpoints.newest() if run.checkpoint.resume else None
    if run.init_from and resume is None:
        settings |= {"base": load_base(net, run, data, options["accelerator"])}
    elif resume:  # it is in the checkpoint what it started from
        settings |= {"base": directory.read_config().get("base")}
    size = {  # measured before training: a class that cannot be built without memory fails here, not at the end
        "n_params": n_params(net),
        "n_params_trained": n_params_trained(net),
        "n_params_by_role": n_params_by_role(net),
        "flops_per_token": flops_per_token(net) + step_flops(net, run.optim, run.head) // tokens_per_step(run, options),
    }
    if resume and is_first_process():
        log.info("resuming %s from %s", directory.path, resume.name)
    trainer, callback = build_trainer(run, options, checkpoints, directory.path, bar)
    loggers = build_loggers(run, directory.path)
    if is_first_process():
        for old in checkpoints.paths() if not run.checkpoint.resume else ():
            checkpoints.remove_checkpoint(old)
        directory.write_config(settings)
        if run.init_from:  # resuming does not need the loaded run
            directory.write_tokenizer(data.tokenizer.to_json())
        first, shown = step_of(resume), run.trainer.get("enable_progress_bar", True)
        console = [ConsoleLogger(first, trainer.max_steps, len(data.val) - 1)] if shown else []
        kept = min(first, trainer.max_steps - 1)  # the row of the last step comes after its checkpoint
        trainer.loggers = [MetricsFile(directory.metrics, kept), *console, *loggers]
        log.info("%s: %s parameters, %s steps", directory.path, f"{size['n_params']:,}", f"{trainer.max_steps:,}")
        if run.data.document_mask and not several_documents(data):
            log.warning("data.document_mask: the training text is one document, so the mask changes nothing")
        if (peak := peak_lr_factor(trainer.max_steps, run.optim)) < MIN_PEAK_LR_FACTOR:
            log.warning("optim.warmup_steps: the learning rate reaches only about %.0f %% of optim.lr", 100 * peak)
    task = LMTask(net, run, data, trainer.max_steps, build_loss(settings["loss"], run.compile))
    with with_settings(loggers if is_first_process() else [], settings):
        try:
            with callback.handling_signals():
                with fast_attention(device, mixed, run.data.seq_len):
                    trainer.fit(task, ckpt_path=resume, weights_only=True)
                if not is_first_process():
                    return {}
                whole = merged(net)
                scores = final_score(run, whole, data, trainer, callback, bar)
        except BaseException as error:
            if callback.signum is not None and is_first_process():
                save_model(merged(net), data.tokenizer, directory.model)  # so that an interrupted run can generate
            elif isinstance(error, Exception) and not isinstance(error, BadInput) and not task.is_finite():
                said = f"weights or gradients are not finite after step {trainer.global_step}"
                raise Diverged(f"{said}, which ended in {type(error).__name__}: {error}") from error
            raise
        result = build_result(run, settings, size, whole, data, trainer, callback, scores)
        save_model(whole, data.tokenizer, directory.model)
        save_adapter(net, run.init_from, directory.adapter)
        directory.write_result(result)
        log_result(loggers, settings, result)
    return result


def step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.name.split("-")[1]) if checkpoint else 0


def several_documents(data: TextData) -> bool:
    """Whether the training text is more than one document. It is read in parts, since it may be larger than memory."""
    parts = (data.train[first : first + CHUNK] for first in range(1, len(data.train), CHUNK))
    return any((part == data.tokenizer.eot).any() for part in parts)
