"""train(run): from a configuration to a finished run directory. The program of this package, read top to bottom."""

import logging
import math
import os
import time
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lm.config import Diverged, RunConfig
from lm.config.checks import error_prefix
from lm.config.identity import RESOLVED, config_hash, differences, flat, without_verbs
from lm.data.batches import TrainingStream
from lm.data.ngram import ExpectedTokens
from lm.data.tokens import TextData, prepare
from lm.formats.base import read_base
from lm.formats.folder import merged, save_adapter, save_model
from lm.lab.measures.diagnostics import Diagnostics
from lm.lab.measures.samples import append_samples, cut_samples, draw_samples
from lm.model.init import named_seed
from lm.scoring import validate
from lm.system.device import fast_attention, is_mixed, seed_generators
from lm.system.files import write_json, write_text
from lm.system.terminal import is_first_process
from lm.training.init_from import load_init_weights
from lm.training.loss import LossOf
from lm.training.metrics import MetricsFile, log_result, trackers, validation_metrics
from lm.training.optim import build_optimizer, lr_factor
from lm.training.processes import Interrupted, Signals, build_fabric
from lm.training.progress import Clock, log_baseline, log_end, log_start, log_validation, shows_bar, training_bar
from lm.training.resolve import build_model, decide, time_run
from lm.training.result import build_result, cost_of
from lm.training.run_directory import RunDirectory, default_directory
from lm.training.state import State, best_files, checkpoints, newest_checkpoint, step_of

RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")  # of the same command, by torchrun and Slurm

log = logging.getLogger(__name__)


def train(run: RunConfig, data: TextData | None = None) -> tuple[Path, dict[str, Any]]:
    """Train a run, or resume it, or read the result of a finished one.

    Returns the directory of the run and the content of its result.json; an empty result on all ranks but the first.
    `data` is the result of `prepare` for this run, if the caller has it already.

    Raises UserError for what the user can correct. Raises Interrupted, KeyboardInterrupt or SystemExit after a signal;
    the same call then resumes the run.
    """
    run.check_init()
    if run.init_from and not run.init_sha256:  # the hash of the weights is part of the identity of the run
        run = replace(run, init_sha256=read_base(run.init_from).sha256)
    directory = RunDirectory(Path(run.run_dir)) if run.run_dir else None
    if directory and (result := directory.finished_result(run)):
        return directory.path, result
    data = data or prepare(run.data, run.tokenizer, quiet=not shows_bar(run))
    settings: dict[str, Any] = {
        "config_hash": config_hash(run, data.hash, data.tokenizer.hash),
        "asked": {key: flat(asdict(run))[key] for key in RESOLVED},  # which the machine will decide
        "data_hash": data.hash,
        "data_revision": data.revision,
        "tokenizer_hash": data.tokenizer.hash,
    }
    directory = directory or RunDirectory(default_directory(run, settings["config_hash"]))
    if result := directory.finished_result(run, settings):
        return directory.path, result
    with error_prefix(f"run_dir={directory.path}") if directory.config.exists() else nullcontext():
        run, steps = directory.as_begun(run)
        run = decide(run, data)  # this machine may lack what the run was begun with
        if run.max_minutes is not None:
            settings["max_minutes"] = run.max_minutes
            if steps is None and is_first_process(run.trainer.world_size):
                steps = time_run(run, data)[0]  # which the first process tells the others
            run = replace(run, max_minutes=None, trainer=replace(run.trainer, max_steps=steps or run.steps))
    torch.set_num_threads(run.threads or 1)
    with directory.lock() if is_first_process(run.trainer.world_size) else nullcontext():
        return directory.path, directory.read_result() or _train_locked(run, directory, settings, data)


def _train_locked(run: RunConfig, directory: RunDirectory, settings: dict[str, Any], data: TextData) -> dict[str, Any]:
    """Train a resolved run in its locked directory, from its newest checkpoint on. Returns its result."""
    first = is_first_process(run.trainer.world_size)
    settings = without_verbs(asdict(run)) | {"run_dir": str(directory.path), "init_record": None} | settings
    if directory.begun_with():  # also with checkpoint.resume=false: the checkpoints may be those of another run
        directory.check_same_run(settings)
    if (saved := directory.read_config()) and not differences(saved, settings):
        settings |= {key: saved.get(key) for key in ("config_hash", "asked", "init_record")}  # as at first
    resumes = run.checkpoint.resume or any(os.environ.get(name, "0") != "0" for name in RESTARTS)
    checkpoint = newest_checkpoint(directory.checkpoints, settings["config_hash"]) if resumes else None
    net = build_model(run, data.tokenizer.vocab_size, data.tokenizer.eot)
    if run.init_from and not checkpoint:
        settings["init_record"] = load_init_weights(net, run, data)
    size = cost_of(net, run)  # a class that cannot be built without memory fails here, not at the end
    fabric, signals = build_fabric(run.trainer), Signals()

    resume_step = checkpoint["step"] if checkpoint else 0
    tracking: Any = trackers(run, directory.path, settings, resume_step) if first else nullcontext([])
    with tracking as loggers:
        if first:
            later = [path for path in best_files(directory.checkpoints) if step_of(path) > resume_step]
            for path in later if resumes else [*checkpoints(directory.checkpoints), *later]:
                path.unlink()
            directory.write_config(settings)
            if run.init_from:  # resuming does not need the loaded run
                directory.model.mkdir(exist_ok=True)
                write_text(directory.model / "tokenizer.json", data.tokenizer.to_json())
            log_start(run, data, directory.path, size["n_params"], resume_step)
        state = None
        try:
            attention = fast_attention(run.trainer.accelerator, is_mixed(run.trainer.precision), run.data.seq_len)
            anomalies = torch.autograd.set_detect_anomaly(run.trainer.detect_anomaly)
            with signals.handling(), attention, anomalies:
                fabric.launch()
                run = fabric.broadcast(run)
                model = fabric.setup(LossOf(net, run))  # `net` is on the device now
                average = deepcopy(net).requires_grad_(False) if run.optim.ema else None
                optimizer = build_optimizer(net, run.optim, run.head)
                state = State(config_hash=settings["config_hash"], net=net, optimizer=optimizer, average=average)
                if checkpoint:
                    state.load(checkpoint)
                del checkpoint
                fit(fabric, model, state, run, data, directory, loggers, signals)
            return finish(state, run, data, directory, settings, size, loggers) if first else {}
        except (Interrupted, KeyboardInterrupt, SystemExit, Diverged) as error:
            is_whole = directory.result.exists()  # with the model that it is of
            if first and state and not is_whole and (state.best_sha256 or not isinstance(error, Diverged)):
                with signals.handling() if isinstance(error, Interrupted) else nullcontext():
                    save_unfinished(state, data, directory)
            raise


# --- the loop


def training_stream(fabric: Fabric, run: RunConfig, data: TextData) -> TrainingStream:
    """The micro-batches of this process."""
    n_micro, seed = run.trainer.accumulate_grad_batches, run.seed
    if run.init_sha256:  # the loaded run may have had this seed: another order than its own
        seed = named_seed(seed, "continued")
    expected, vocab_size = None, data.tokenizer.vocab_size
    if run.ngram_smoothing:
        expected = ExpectedTokens(data.train, vocab_size, n_rows=max(vocab_size, run.model.vocab_rows or 0))
    return TrainingStream(
        data.train,
        seq_len=run.data.seq_len,
        batch_size=run.data.batch_size // n_micro,
        seed=seed,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        overfit_batches=run.data.overfit_batches * n_micro,
        documents=data.documents() if run.data.order == "documents" else None,
        expected=expected,
        smoothing=run.ngram_smoothing,
    )


def train_step(
    fabric: Fabric,
    model: Any,
    state: State,
    run: RunConfig,
    stream: TrainingStream,
    diagnostics: Diagnostics | None = None,
) -> tuple[float, Tensor, Tensor]:
    """Make one optimizer step. Returns its learning rate, its loss and the norm of its gradient before clipping.

    The loss is the mean over the micro-batches of this process.
    """
    net, optimizer, n_micro = state.net, state.optimizer, run.trainer.accumulate_grad_batches
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * lr_factor(state.step, run.steps, run.optim)
    net.head.on_train_step(state.step / run.steps, net.embed.weight, optimizer.state)
    losses = []
    for k in range(n_micro):
        number = state.step * n_micro + k
        batch = [t.pin_memory() if fabric.device.type == "cuda" else t for t in stream.batch(number)]
        tokens, targets = fabric.to_device(batch)  # (B, T) each, with B = data.batch_size / n_micro
        seed_generators(named_seed(run.seed, "step", number, fabric.global_rank), fabric.device)  # of dropout
        with fabric.no_backward_sync(model, enabled=k < n_micro - 1):
            loss = model(tokens, targets)
            fabric.backward(loss / n_micro)
        losses.append(loss.detach())
    if diagnostics:
        diagnostics.before_clipping()
    norm = nn.utils.clip_grad_norm_(net.parameters(), run.trainer.gradient_clip_val or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    state.step += 1
    if run.optim.ema is not None:
        state.update_average(run.optim.ema)
    return optimizer.param_groups[0]["lr"], torch.stack(losses).mean(), norm


def fit(
    fabric: Fabric,
    model: Any,
    state: State,
    run: RunConfig,
    data: TextData,
    directory: RunDirectory,
    loggers: list[Any],
    signals: Signals,
) -> None:
    """Train until the run ends by its steps or its patience. Raises Interrupted after a signal, or Diverged.

    The last step has no row here: its row is written with the final score.
    """
    first, stream = fabric.is_global_zero, training_stream(fabric, run, data)
    diagnostics = Diagnostics(directory.diagnostics, run, data, state) if run.diagnostics.every else None
    files = [MetricsFile(directory.metrics, state.step, state.logged_step, loggers)] if first else []
    files += [diagnostics.file] if diagnostics else []
    samples_file = directory.samples if first and run.prompts and run.validation.every else None
    if samples_file:
        cut_samples(samples_file, state.step)
    started = time.perf_counter() - state.seconds  # as if one process made all steps
    speaks, clock = first and run.trainer.enable_progress_bar, Clock(run, state)
    with training_bar(run, state) as bar:
        while state.ended_by is None:
            lr, loss, norm = train_step(fabric, model, state, run, stream, diagnostics)
            step = state.step
            if step == run.steps:
                state.ended_by = "steps"
            if bar.update(run.tokens_per_step):  # true when tqdm has redrawn, about ten times a second
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            if speaks:
                clock.after_step(state, loss)
            if diagnostics:
                diagnostics.after_step(norm)

            logs = step % run.trainer.log_every_n_steps == 0
            saves = step % run.checkpoint.every == 0
            validates = run.validation.every and step % run.validation.every == 0 and not state.ended_by
            row: dict[str, float] = {}
            if logs or saves or validates or state.ended_by:
                row = {"tokens": step * run.tokens_per_step, "lr": lr, **finite_metrics(fabric, run, step, loss, norm)}
                state.last_row = row
            if validates:
                scores = validate(state.eval_net, run, data, max_batches=run.validation.batches)
                row |= validation_metrics(scores, data)
                state.update_best(scores.loss, directory.checkpoints if first and run.checkpoint.best else None)
                patience = run.checkpoint.patience
                if patience and fabric.broadcast(step - state.best_step >= patience * run.validation.every):
                    state.ended_by = "patience"
            state.seconds = time.perf_counter() - started  # where numbers were read, a GPU has caught up
            if (logs or validates) and not state.ended_by:
                state.logged_step = step
                if first:
                    files[0].append(step, row)
            if validates and speaks:
                log_validation(run, data, state, row)
            if validates and samples_file:
                append_samples(samples_file, state, run, data)

            stops = None
            if fabric.world_size == 1 or logs or state.ended_by:  # several processes have to agree, which takes time
                stops = signals.arrived(fabric, step)
            if stops and not row:
                finite_metrics(fabric, run, step, loss, norm)  # no checkpoint of a step that is not finite
            if stops or saves or state.ended_by:
                for file in files:
                    file.sync()  # a checkpoint must not be newer than the rows on disk
                if first:
                    state.save(directory.checkpoints, run.checkpoint.keep)
                fabric.barrier()
            if stops:
                raise stops
    if stops := signals.arrived(fabric, state.step):
        raise stops


def finish(
    state: State,
    run: RunConfig,
    data: TextData,
    directory: RunDirectory,
    settings: dict[str, Any],
    size: dict[str, Any],
    loggers: list[Any],
) -> dict[str, Any]:
    """Score the model of the run on the whole validation text; write the last row, model/ and, last, result.json."""
    log_end(run, data, state)
    net, step = state.eval_net, state.step
    scores = last = validate(merged(net), run, data, bar=shows_bar(run))
    check_finite(run, f"the validation loss is {last.loss}", last.loss)
    if state.best_sha256:  # the best estimate: it may not be the best on the whole text
        best = state.best_net(directory.checkpoints)
        best_scores = validate(merged(best), run, data, bar=shows_bar(run))
        if best_scores.loss < last.loss:
            net, step, scores = best, state.best_step, best_scores
    model = merged(net)
    # the run may have been resumed from its last checkpoint when the row was there
    metrics = MetricsFile(directory.metrics, state.step - 1, loggers=loggers)
    metrics.append(state.step, state.last_row | validation_metrics(last, data))
    samples = draw_samples(model, data, run.prompts, is_finished=True)
    result = build_result(run, settings, size, data, state, scores, samples)
    if run.checkpoint.best:
        result["best"] = {"step": step, "val_loss": scores.loss, "last_val_loss": last.loss}
        log.info("model/ is that of step %d: val_loss %.4f, that of the last step %.4f", *result["best"].values())
    log_baseline(replace(run, max_minutes=settings["max_minutes"]), data, result)
    save_model(model, data.tokenizer, directory.model)
    save_adapter(net, run.init_from, directory.adapter)
    write_json(directory.result, result)
    log_result(loggers, settings, result)
    return result


def save_unfinished(state: State, data: TextData, directory: RunDirectory) -> None:
    """Save the best model, if the run keeps it, or the last one, so that a run without a result can generate."""
    net = state.eval_net
    if state.best_sha256:
        net = state.best_net(directory.checkpoints)
        message = "model/ is that of step %d, whose val/loss %.4f is the lowest so far"
        log.info(message, state.best_step, state.best_loss)
    save_model(merged(net), data.tokenizer, directory.model)


def finite_metrics(fabric: Fabric, run: RunConfig, step: int, loss: Tensor, norm: Tensor) -> dict[str, float]:
    """Loss and norm as columns, the mean over all processes. Raises Diverged if a number is not finite."""
    mean: Any = fabric.all_reduce(loss, reduce_op="mean")
    train_loss, grad_norm = mean.item(), norm.item()
    message = f"the loss is {train_loss} and the gradient norm {grad_norm} at step {step}"
    check_finite(run, message, train_loss, grad_norm)
    return {"train/loss": train_loss, "train/grad_norm": grad_norm}


def check_finite(run: RunConfig, message: str, *values: float) -> None:
    """Raise Diverged with the message if a value is not finite."""
    if not all(map(math.isfinite, values)):
        advice = f"choose optim.lr below {run.optim.lr} or a lower trainer.gradient_clip_val"
        raise Diverged(f"{message}: {advice}")
