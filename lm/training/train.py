"""train(run): from a configuration to a finished run directory. The program of this package, read top to bottom."""

import atexit
import logging
import math
import os
import signal
import sys
import warnings
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lm.config import Diverged, RunConfig, UserError
from lm.config.checks import error_prefix
from lm.config.identity import RESOLVED, config_hash, flat, without_verbs
from lm.data.tokenizer import Chat
from lm.data.tokens import TextData, prepare
from lm.formats.adapter import merged, save_adapter
from lm.formats.chat import save_chat
from lm.formats.folder import save_model
from lm.inference.evaluate import Scores, validate
from lm.model.transformer import Transformer
from lm.system.device import fast_attention, is_mixed
from lm.system.files import write_json, write_text
from lm.system.terminal import is_first_process
from lm.training.best import BestModel, copied_state
from lm.training.callbacks import LogAndValidate, ProgressBar, SamplesDuringTraining, check_finite
from lm.training.checkpoint import AtomicCheckpointIO, Checkpoints, checkpoints, newest_checkpoint, step_of
from lm.training.diagnostics import Diagnostics
from lm.training.init_from import load_init_weights, pin_init_weights
from lm.training.metrics import MetricsFile, log_result, trackers, validation_metrics
from lm.training.module import LMModule
from lm.training.optim import MIN_PEAK_LR_FACTOR, peak_lr_factor
from lm.training.resolve import build_model, check_memory, least_bytes, resolve
from lm.training.result import build_result, size_of
from lm.training.run_directory import RunDirectory, default_directory, finished_result
from lm.training.samples import last_samples
from lm.training.signals import Interrupted, StopOnSignal, handled_signals

FEW_TOKENS = 5_000  # a few pages of text
MANY_EPOCHS = 10  # above which a text is learned by heart, and is so said
GOOD_EPOCHS = 4  # as good as so much new text, or nearly (Muennighoff et al., 2023)
SMALL_TEXT = 300_000  # tokens of BPE: about a megabyte
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")  # of the same command, by torchrun and Slurm
TOKENS_PER_PARAMETER = 20  # in training, above which a larger model gains more (Hoffmann et al., 2022)

log = logging.getLogger(__name__)


def train(run: RunConfig, data: TextData | None = None) -> tuple[Path, dict[str, Any]]:
    """Train a run, or resume it, or read the result of a finished one.

    Returns the directory of the run and the content of its result.json; an empty result on all ranks but the first.
    `data` is the result of `prepare` for this run, if the caller has it already.

    Raises UserError for what the user can correct. Raises Interrupted, KeyboardInterrupt or SystemExit after a signal;
    the same call then resumes the run.
    """
    run = pin_init_weights(run)
    directory = RunDirectory(Path(run.run_dir)) if run.run_dir else None
    if directory and (result := finished_result(directory, run)):
        return directory.path, result
    data = data or prepare(run.data, run.tokenizer, quiet=not _shows_bar(run))
    settings: dict[str, Any] = {
        "config_hash": config_hash(run, data.hash, data.tokenizer.hash),
        "asked": {key: flat(asdict(run))[key] for key in RESOLVED},  # which the machine will decide
        "data_hash": data.hash,
        "data_revision": data.revision,
        "tokenizer_hash": data.tokenizer.hash,
    }
    directory = directory or RunDirectory(default_directory(run, settings["config_hash"]))
    if result := finished_result(directory, run, settings):
        return directory.path, result
    with error_prefix(f"run_dir={directory.path}") if directory.config.exists() else nullcontext():
        run = resolve(run, data.tokenizer.vocab_size)  # this machine may lack what the run was begun with
    check_memory(run, data.tokenizer.vocab_size)
    torch.set_num_threads(run.threads or 1)
    with directory.lock() if is_first_process(run.trainer.world_size) else nullcontext():
        return directory.path, directory.read_result() or _fit(run, directory, settings, data)


def _fit(run: RunConfig, directory: RunDirectory, settings: dict[str, Any], data: TextData) -> dict[str, Any]:
    """Train a resolved run in its locked directory, from its newest checkpoint on. Returns its result."""
    first = is_first_process(run.trainer.world_size)
    settings = without_verbs(asdict(run)) | {"run_dir": str(directory.path), "init_record": None} | settings
    saved = directory.read_config() if checkpoints(directory.checkpoints) else {}
    if saved:  # also with checkpoint.resume=false: the checkpoints may be those of another run
        directory.check_same_run(settings)
        settings |= {key: saved.get(key) for key in ("config_hash", "asked", "init_record")}  # as at first
    resumes = run.checkpoint.resume or any(os.environ.get(name, "0") != "0" for name in RESTARTS)
    resume = newest_checkpoint(directory.checkpoints, settings["config_hash"]) if resumes else None
    if resume and run.trainer.precision == "64-true":  # Lightning restores the weights in fp32
        advice = "checkpoint.resume=false trains it anew, trainer.precision=32-true is a run that can be resumed"
        raise UserError(f"trainer.precision=64-true: {resume} cannot be resumed exactly; {advice}")
    net, chat = build_model(run, data.tokenizer.vocab_size, data.tokenizer.eot), Chat()
    if run.init_from and not resume:
        settings["init_record"], chat = load_init_weights(net, run, data)
    size = size_of(net, run)  # a class that cannot be built without memory fails here, not at the end

    with ExitStack() as stack:
        loggers = stack.enter_context(trackers(run, directory.path, settings, step_of(resume))) if first else []
        module = LMModule(net, run, data, settings["config_hash"])
        metrics = None
        if first:
            for path in checkpoints(directory.checkpoints) if not resumes else ():
                path.unlink()
            directory.write_config(settings)
            if run.init_from:  # resuming does not need the loaded run
                directory.model.mkdir(exist_ok=True)
                write_text(directory.model / "tokenizer.json", data.tokenizer.to_json())
                save_chat(chat, directory.model)
            metrics = MetricsFile(directory.metrics, step_of(resume))
            length = f"{run.steps:,} steps" if run.max_minutes is None else f"{run.max_minutes:g} minutes"
            memory = f"at least {least_bytes(run, data.tokenizer.vocab_size) / 1e6:,.0f} MB of memory"
            log.info("%s: %s parameters, %s, %s", directory.path, f"{size['n_params']:,}", memory, length)
            if resume:
                log.info("resuming from %s", resume.name)
            _log_epochs(run, data)
            _log_warnings(run, data)
        timing, stop = LogAndValidate(metrics), StopOnSignal()
        trainer = build_trainer(run, directory, [timing, stop])
        trainer.loggers = loggers
        try:
            attention = fast_attention(run.trainer.accelerator, is_mixed(run.trainer.precision), run.data.seq_len)
            with stop.handling_signals(), attention:
                trainer.fit(module, ckpt_path=resume, weights_only=True)
            stop.raise_interrupted(trainer)
            if not first:
                return {}
            _log_end(run, data, timing)
            model, scores, last = _final_model(module.scored, timing.best, run, data, trainer.strategy.root_device)
            check_finite(run, f"the validation loss is {last.loss}", last.loss)
        except (Interrupted, KeyboardInterrupt, SystemExit, Diverged) as error:
            if first and (timing.best.weights or not isinstance(error, Diverged)):
                with stop.handling_signals() if isinstance(error, Interrupted) else nullcontext():
                    _save_unfinished(module.scored, timing.best, data, directory)
            raise
        # its row comes after its checkpoint, from which the run may have been resumed when the row was there
        timing.metrics = MetricsFile(directory.metrics, timing.step - 1)
        timing.log_row(trainer, timing.last_metrics | validation_metrics(last, data))
        result = build_result(run, settings, size, data, timing, scores, last_samples(model, data, run.prompts))
        if run.checkpoint.best:
            step = timing.step if scores is last else timing.best.step
            result["best"] = {"step": step, "val_loss": scores.loss, "last_val_loss": last.loss}
            log.info("model/ is that of step %d: val_loss %.4f, that of the last step %.4f", *result["best"].values())
        _log_baseline(run, data, result)
        save_model(model, data.tokenizer, directory.model)
        save_adapter(module.scored, run.init_from, directory.adapter)
        write_json(directory.result, result)
        log_result(loggers, settings, result)
    return result


def _save_unfinished(net: Transformer, best: BestModel, data: TextData, directory: RunDirectory) -> None:
    """Save the best model, if the run keeps it, or the last one, so that a run without a result can generate."""
    if best.weights:
        best.load_into(net)
        log.info("model/ is that of step %d, whose val/loss %.4f is the lowest so far", best.step, best.loss)
    save_model(merged(net), data.tokenizer, directory.model)


def _final_model(
    net: Transformer, best: BestModel, run: RunConfig, data: TextData, device: torch.device
) -> tuple[Transformer, Scores, Scores]:
    """The model of the run, its scores on the whole validation text, and those of the model of the last step.

    They are the same, unless the run keeps its best model and that is better on the whole text too. `net` has the
    weights of the model of the run afterwards.
    """

    def score() -> tuple[Transformer, Scores]:
        model = merged(net)
        model.to(device)  # Lightning has moved it to the CPU
        return model, validate(model, run, data, bar=_shows_bar(run))

    model, last = score()
    if not best.weights:
        return model, last, last
    weights = copied_state(net)
    best.load_into(net)
    model, scores = score()
    if scores.loss < last.loss:
        return model, scores, last
    net.load_state_dict(weights)
    return merged(net), last, last


def _cluster_environment(run: RunConfig) -> list[Any]:
    """By what Lightning learns which process of the run this one is; nothing: it finds out.

    A run in one process has no ranks, whatever those who started many of them number: srun, torchrun, MPI. Under Slurm
    Lightning would save checkpoints of its own and queue the job again.
    """
    if run.trainer.world_size == 1:
        return [LightningEnvironment()]
    try:
        is_slurm = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
        return [SLURMEnvironment(auto_requeue=False)] if is_slurm else []
    except RuntimeError as error:  # its variables contradict each other
        raise UserError(f"trainer: {str(error).splitlines()[0]}") from error


def build_trainer(run: RunConfig, directory: RunDirectory, callbacks: list[Callback]) -> Trainer:
    """Lightning's Trainer. Its callbacks act in this order after each step: measure, sample, log, stop, save."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # not its tips and lists of absent accelerators
    warnings.filterwarnings("ignore", module="lightning", message=".*(num_workers|train_dataloader|LeafSpec|srun).*")
    before: list[Callback] = [ProgressBar()] if _shows_bar(run) else []
    if run.diagnostics.every:
        before.append(Diagnostics(directory.path / "diagnostics.csv", run.diagnostics.every))
    if run.prompts and run.validation.every:
        before.append(SamplesDuringTraining(directory.path / "samples.jsonl"))
    saving = Checkpoints(directory.checkpoints, run.checkpoint.every, run.checkpoint.keep)
    arguments = asdict(run.trainer) | {
        "strategy": run.trainer.strategy if run.trainer.world_size > 1 else "auto",  # alone, DDP has no peer to find
        "max_epochs": -1,
        "limit_val_batches": 0,  # LogAndValidate validates
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "logger": False,
        "default_root_dir": directory.path / "profile",  # where Lightning finds no hpc_ckpt_* to start from
        "callbacks": [*before, *callbacks, saving],
        "plugins": [AtomicCheckpointIO(), *_cluster_environment(run)],
    }
    try:
        trainer = Trainer(**arguments)
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise UserError(f"trainer: {str(error).splitlines()[0]}") from error
    if trainer.world_size != run.trainer.world_size:
        product = f"trainer.devices * trainer.num_nodes is {run.trainer.world_size}"
        raise UserError(f"trainer.devices: {product}, but {trainer.world_size} processes train")
    if trainer.world_size > 1:
        atexit.register(_leave_process_group)
    return trainer


def _leave_process_group() -> None:
    """Destroy the process group when the interpreter exits: only then, for the jobs of a sweep share it.

    A Gloo thread that is still busy at exit would abort the process, and torchrun on the other nodes would wait five
    minutes for this one. Lightning destroys the group for NCCL only. This blocks until pending collectives have
    ended: at once where another process has died, after the group's timeout of 30 minutes where it hangs.
    """
    for signum in handled_signals():  # Python's handlers are not called while this blocks
        signal.signal(signum, signal.SIG_DFL)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _shows_bar(run: RunConfig) -> bool:
    return run.trainer.enable_progress_bar and sys.stderr.isatty() and is_first_process(run.trainer.world_size)


def _log_epochs(run: RunConfig, data: TextData) -> None:
    """Say how often the text will be read, and which settings help where that is often."""
    if run.max_minutes is not None:
        return
    epochs = run.steps * run.tokens_per_step / len(data.train)
    log.info("the training text of %s tokens will be read %.1f times", f"{len(data.train):,}", epochs)
    if epochs > MANY_EPOCHS and not run.data.overfit_batches and not run.model.dropout:
        fewer = round(GOOD_EPOCHS * len(data.train) / run.tokens_per_step)
        unused = {
            "experiment=chars": run.tokenizer.kind == "bpe" and len(data.train) < SMALL_TEXT and not run.init_from,
            f"trainer.max_steps={fewer}": fewer > 0 and run.max_tokens is None,
            "model.dropout=0.2": run.model.dropout == 0,
            "checkpoint.best=true": not run.checkpoint.best and 0 < run.validation.every < run.steps,
        }
        helping = ", ".join(setting for setting, is_unused in unused.items() if is_unused)
        advice = f"what may help: {helping}; " if helping else ""
        log.info("so often that it is learned by heart; %ssee docs/own-text.md", advice)


def _log_end(run: RunConfig, data: TextData, timing: LogAndValidate) -> None:
    """Say where training ended if that was not known at its start."""
    if timing.ended_by != "steps":
        epochs = timing.step * run.tokens_per_step / len(data.train)
        log.info("ended by %s after step %s: the text was read %.1f times", timing.ended_by, f"{timing.step:,}", epochs)


def _log_baseline(run: RunConfig, data: TextData, result: dict[str, Any]) -> None:
    """Say so if the n-gram model of the same text is better, with the likeliest cause and one setting to change."""
    bits, baseline = result["val_bpb"], data.baselines.get("ngram", math.inf)
    if bits > baseline and not run.data.overfit_batches:
        comparison = "%.3f bits per byte are more than the %.3f of an n-gram model of this text: %s; try %s"
        log.warning(comparison, bits, baseline, *_likely_cause(run, len(data.train), result))


def _likely_cause(run: RunConfig, n_text: int, result: dict[str, Any]) -> tuple[str, str]:
    tokens, n_params = result["tokens"], result["n_params"]
    epochs, enough = tokens / n_text, min(GOOD_EPOCHS * n_text, TOKENS_PER_PARAMETER * n_params)
    often = f"it was read {epochs:.1f} times, which is too often"
    if run.tokenizer.kind == "bpe" and n_text < SMALL_TEXT and not run.init_from:
        return often if epochs > GOOD_EPOCHS else f"it is short, {n_text:,} tokens", "experiment=chars"
    if epochs > MANY_EPOCHS and run.model.dropout:  # with which a text may be read often
        return f"a text of {n_text:,} tokens is short", "a longer one"
    if epochs > MANY_EPOCHS:
        return often, _length(run, GOOD_EPOCHS * n_text, tokens)
    if tokens < enough:
        return f"the run was short, {tokens:,} tokens", _length(run, enough, tokens)
    larger = "init_from=RUN with a larger one" if run.init_from else f"model.d_model={2 * run.model.d_model}"
    return f"the model is small, {n_params:,} parameters", larger


def _length(run: RunConfig, n_tokens: int, made: int) -> str:
    """The setting by which a run of `made` tokens would have about `n_tokens`."""
    if run.max_minutes is not None:
        return f"max_minutes={float(f'{run.max_minutes * n_tokens / made:.2g}'):g}"
    return f"max_tokens={n_tokens}" if run.max_tokens else f"trainer.max_steps={-(-n_tokens // run.tokens_per_step)}"


def _log_warnings(run: RunConfig, data: TextData) -> None:
    """Warn about settings that have no effect, or less than it seems."""
    if (n_tokens := len(data.train)) < FEW_TOKENS:
        log.warning("data: the training text has only %s tokens: so short a text is memorised", n_tokens)
    if run.data.document_mask and len(data.documents()) == 1:
        log.warning("data.document_mask: the training text is one document, so the mask changes nothing")
    if run.trainer.precision == "64-true":
        log.warning("trainer.precision=64-true: if this run is interrupted, it cannot be resumed")
    if (peak := peak_lr_factor(run.steps, run.optim)) < MIN_PEAK_LR_FACTOR:
        log.warning("optim.warmup_steps: the learning rate reaches only about %.0f %% of optim.lr", 100 * peak)
