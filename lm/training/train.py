"""train(run): from a configuration to a finished run directory.

Read from top to bottom: `train` finds out which run it is, `Engine.step` makes one step, `setup` refuses and builds,
`fit` loops, `finish` scores and writes.
"""

import logging
import math
import os
import shutil
import time
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import nn

from lm.config import (
    REQUESTED,
    RunConfig,
    build,
    change,
    check_init,
    config_hash,
    differing_keys,
    requested_settings,
    user_classes,
)
from lm.data.batches import TrainingStream
from lm.data.sources import local_states
from lm.data.tokens import TextData, prepare
from lm.errors import Diverged, error_prefix, require
from lm.folder import read_result, save_model
from lm.model.init import named_seed
from lm.model.transformer import Transformer
from lm.registry import from_lab
from lm.scoring import Scores, validate
from lm.system.device import default_state, fast_attention, is_mixed, seed_generators
from lm.system.files import sync_files, write_json, write_text
from lm.system.signals import Interrupted, Signals
from lm.system.terminal import is_first_process
from lm.training.log import (
    MetricsFile,
    Observer,
    Progress,
    Step,
    log_baseline,
    log_start,
    readings,
    shows_bar,
    validation_metrics,
)
from lm.training.loss import LossOf
from lm.training.optim import build_optimizer, lr_factor
from lm.training.resolve import build_fabric, build_model, resolve, with_steps
from lm.training.result import build_result, cost_of
from lm.training.run_directory import RunDirectory, code_of_run, default_directory
from lm.training.state import State, checkpoints, newest_checkpoint

# Set by launchers that start a command again. The run then resumes, even with checkpoint.resume=false.
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
log = logging.getLogger(__name__)


def train(run: RunConfig, data: TextData | None = None) -> tuple[Path, dict[str, Any]]:
    """Train a run, or resume it, or read the result of a finished run.

    Returns the directory of the run and the content of its result.json; an empty result on all ranks
    but the first. `data` is the result of `prepare` for this run, if the caller has it already.

    Raises UserError for what the user can correct. Raises Interrupted, KeyboardInterrupt or
    SystemExit after a signal; the same call then resumes the run.
    """
    require(isinstance(run, RunConfig), f"run={run!r:.80}", "the configuration that lm.run_config('my.txt') returns")
    run = build(RunConfig, asdict(run))  # checks values that Python gave, as values of a file are checked
    check_init(run)
    if run.init_from and not run.init_sha256:  # the hash of the weights decides the run
        run = replace(run, init_sha256=from_lab("lm.lab.init_from.base.read_base")(run.init_from).sha256)
    directory = RunDirectory(Path(run.run_dir)) if run.run_dir else None
    if directory and (result := directory.finished_result(run)):
        return directory.path, result
    # Before the text is read, which may take minutes. `setup` asks again, with the hash of the text.
    if directory and directory.has_begun():
        directory.check_same_run(run, {})
    elif directory:
        directory.check_is_run()
    data = data or prepare(run.data, run.tokenizer)
    hashes = {"data_hash": data.hash, "tokenizer_hash": data.tokenizer.hash}
    directory = directory or RunDirectory(default_directory(run, config_hash(run, **hashes)))
    if result := directory.finished_result(run, hashes):
        return directory.path, result
    is_first = is_first_process(run.trainer.world_size)
    with directory.lock() if is_first else nullcontext():
        if result := read_result(directory.result):  # another process has just finished the run
            return directory.path, result
        return directory.path, _train_locked(run, directory, hashes, data)


def _train_locked(run: RunConfig, directory: RunDirectory, hashes: dict[str, str], data: TextData) -> dict[str, Any]:
    """Train a run in its locked directory, from its newest checkpoint on. Returns its result."""
    signals = Signals()
    with ExitStack() as stack, default_state():
        engine = setup(run, directory, hashes, data, stack)
        run, state, is_first = engine.run, engine.state, engine.fabric.is_global_zero
        try:
            # `finish` scores without this context, as the command `evaluate` does, which repeats the score.
            attention = fast_attention(run.trainer.accelerator, is_mixed(run.trainer.precision), run.data.seq_len)
            with signals.deferred(), attention:
                fit(engine, signals)
            return finish(engine) if is_first else {}
        except (Interrupted, KeyboardInterrupt, SystemExit, Diverged) as error:
            can_save = state.best is not None or not isinstance(error, Diverged)
            if is_first and can_save and not directory.result.exists():
                with signals.deferred() if isinstance(error, Interrupted) else nullcontext():
                    save_unfinished(engine)
            raise


# --- a step, and what it works with


@dataclass
class Engine:
    """What the loop works with."""

    run: RunConfig  # every setting is decided
    data: TextData
    directory: RunDirectory
    settings: dict[str, Any]  # the content of config.yaml
    cost: dict[str, Any]  # parameters and FLOPs, for result.json
    fabric: Fabric
    model: Any  # LossOf, as Fabric has wrapped it
    state: State
    stream: TrainingStream
    loggers: list[Any]  # trackers beside metrics.csv

    def step(self, observers: list[Observer]) -> Step:
        """Make one optimizer step. The loss is the mean over the micro-batches of this process."""
        run, state, fabric = self.run, self.state, self.fabric
        net, optimizer, n_micro = state.net, state.optimizer, run.trainer.accumulate_grad_batches
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_factor(state.step, run.steps, run.optim)
        net.head.on_train_step(state.step / run.steps, net.embed.weight, optimizer.state)
        losses = []
        for k in range(n_micro):
            number = state.step * n_micro + k
            batch = [*self.stream.batch(number)]
            if fabric.device.type == "cuda":
                batch = [tensor.pin_memory() for tensor in batch]
            tokens, targets = fabric.to_device(batch)  # (B, T) each, with B = batch_size / n_micro
            seed_generators(named_seed(run.seed, "step", number, fabric.global_rank), fabric.device)  # of dropout
            with fabric.no_backward_sync(self.model, enabled=k < n_micro - 1):
                loss = self.model(tokens, targets)
                fabric.backward(loss / n_micro)
            losses.append(loss.detach())
        for observer in observers:
            observer.before_clip()
        norm = nn.utils.clip_grad_norm_(net.parameters(), run.trainer.gradient_clip_val or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        if run.optim.ema is not None:
            state.update_average(run.optim.ema)
        return Step(state.step, optimizer.param_groups[0]["lr"], torch.stack(losses).mean(), norm)

    def validate(self, net: Any, max_batches: int | None = None) -> Scores:
        """Score a model on the validation text, or on evenly spaced windows of `max_batches` batches."""
        shows = max_batches is None and shows_bar(self.run)
        return validate(net, self.run, self.data, max_batches, bar=shows)

    def finite_row(self, step: Step) -> dict[str, float]:
        """Return the numbers of a step, the mean over all processes. Raises Diverged if one is not finite.

        The row of such a step is the last one of metrics.csv.
        """
        mean: Any = self.fabric.all_reduce(step.loss, reduce_op="mean")
        loss, norm, tokens = mean.item(), step.norm.item(), self.state.step * self.run.tokens_per_step
        row = {"tokens": tokens, "lr": step.lr, "train/loss": loss, "train/grad_norm": norm}
        try:
            check_finite(self.run, f"the loss is {loss} and the gradient norm {norm} at step {step.number}", loss, norm)
        except Diverged:
            if self.fabric.is_global_zero:
                self.append_last_row(row)
            raise
        return row

    def append_last_row(self, row: dict[str, float]) -> None:
        """Write the last row of metrics.csv. A killed process may have written a row of this step: drop that row."""
        metrics = MetricsFile(self.directory.metrics, self.state.step - 1, loggers=self.loggers)  # drops later rows
        metrics.append(self.state.step, row)


def check_finite(run: RunConfig, message: str, *values: float) -> None:
    if not all(map(math.isfinite, values)):
        advice = f"optim.lr_scale={run.optim.lr_scale / 4:g} divides all learning rates by four"
        raise Diverged(f"{message}; {advice}")


# --- setup: what can be wrong is refused here


def setup(run: RunConfig, directory: RunDirectory, hashes: dict[str, str], data: TextData, stack: ExitStack) -> Engine:
    """Refuse what this run cannot do here; build the model and its state; remove the remains of an attempt before.

    `stack` closes the trackers and contexts of the run. Raises UserError.
    """
    is_first, vocab_size = is_first_process(run.trainer.world_size), data.tokenizer.vocab_size
    restarted = any(os.environ.get(name, "0") != "0" for name in RESTARTS)
    resumes, begun = run.checkpoint.resume or restarted, directory.has_begun()
    identity: dict[str, Any] = {"config_hash": config_hash(run, **hashes), "code": code_of_run(run.model)}
    requested, saved = requested_settings(run), directory.read_config()
    identity["requested"] = {key: requested[key] for key in REQUESTED}
    if begun:
        directory.check_same_run(run, hashes)
        if resumes:
            directory.check_code(run)
    # A run that was killed before its first checkpoint has a config.yaml too: what it has decided stays.
    if saved and (begun or not differing_keys(saved, requested | hashes)):
        identity |= {key: saved[key] for key in ("config_hash", "requested")}
        run = directory.as_decided(run)
    with error_prefix(f"run_dir={directory.path}") if begun else nullcontext():
        run = resolve(run, vocab_size)
    if not begun and is_first:  # the others get this run by fabric.broadcast
        run = with_steps(run, data)
    torch.set_num_threads(run.threads or 1)

    checkpoint = newest_checkpoint(directory.checkpoints, identity["config_hash"]) if resumes else None
    if user_classes(run.model):
        from_lab("lm.lab.user_class.try_classes")(run, vocab_size)
    net = build_model(run, vocab_size, data.tokenizer.eot)
    init_record = saved.get("init_record") if checkpoint else None
    if run.init_from and not checkpoint:
        init_record = from_lab("lm.lab.init_from.weights.load_init_weights")(net, run, data)
    expected = expected_tokens(run, data)
    cost = cost_of(net, run)  # now, because operations of a class of the user may be impossible to count
    # `other_code` and `checkpoint.resume` hold for one command.
    kept = change(run, {"other_code": False, "checkpoint.resume": True})
    settings = asdict(kept) | {"run_dir": str(directory.path), "init_record": init_record}
    settings |= {"data_revision": data.revision, **hashes, **identity}
    settings["started_in"] = os.path.relpath(os.curdir, directory.path)  # where paths of the text lead from
    settings["states"] = local_states(run.data)  # of the files, which a later command may compare
    fabric = build_fabric(run.trainer)

    loggers: list[Any] = []
    if is_first:
        step = checkpoint["step"] if checkpoint else 0
        if any(asdict(run.logger).values()):
            trackers = from_lab("lm.lab.trackers.trackers")
            loggers = stack.enter_context(trackers(run, directory.path, settings, step))
        for path in [] if resumes else checkpoints(directory.checkpoints):
            path.unlink()
        if not checkpoint:  # what an attempt before has logged; MetricsFile begins metrics.csv anew
            for path in (directory.samples, directory.diagnostics):
                path.unlink(missing_ok=True)
            for folder in (directory.model, directory.adapter):
                shutil.rmtree(folder, ignore_errors=True)
        directory.write_config(settings)
        if run.tokenizer.kind == "file":  # a resume needs neither the file nor a loaded run
            directory.model.mkdir(exist_ok=True)
            write_text(directory.tokenizer, data.tokenizer.to_json())
        log_start(run, data, directory.path, cost["n_params"], step)

    stack.enter_context(torch.autograd.set_detect_anomaly(run.trainer.detect_anomaly))
    fabric.launch()  # starts the other processes, unless torchrun or srun has: they too run all of the above
    run = fabric.broadcast(run)
    model = fabric.setup(LossOf(net, run))  # `net` is on the device now
    state = State(
        config_hash=identity["config_hash"],
        net=net,
        optimizer=build_optimizer(net, run.optim, run.head),
        average=deepcopy(net).requires_grad_(False) if run.optim.ema else None,
    )
    if checkpoint:
        state.load(checkpoint)
    stream = training_stream(fabric, run, data, expected)
    return Engine(run, data, directory, settings, cost, fabric, model, state, stream, loggers)


def expected_tokens(run: RunConfig, data: TextData) -> Any:
    """Return what the targets are mixed with under ngram_smoothing, else None. Raises UserError for a long text."""
    if not run.ngram_smoothing:
        return None
    vocab_size = data.tokenizer.vocab_size
    n_rows = max(vocab_size, run.model.vocab_rows or 0)
    return from_lab("lm.lab.targets.ExpectedTokens")(data.train, vocab_size, n_rows=n_rows)


def training_stream(fabric: Fabric, run: RunConfig, data: TextData, expected: Any) -> TrainingStream:
    """Return the micro-batches of this process."""
    n_micro, seed = run.trainer.accumulate_grad_batches, run.seed
    if run.init_sha256:  # the loaded run may have had this seed: the order of its batches is not repeated
        seed = named_seed(seed, "continued")
    return TrainingStream(
        data.train,
        seq_len=run.data.seq_len,
        batch_size=run.data.batch_size // n_micro,
        seed=seed,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        overfit_batches=run.data.overfit_batches * n_micro,
        document_starts=data.document_starts() if run.data.order == "documents" else None,
        expected=expected,
        smoothing=run.ngram_smoothing,
    )


def observers_of(engine: Engine) -> list[Observer]:
    """Return what watches the run in this process. The lab's observers are named as text."""
    run, state, directory = engine.run, engine.state, engine.directory
    if not engine.fabric.is_global_zero:
        return []
    observers: list[Observer] = [
        MetricsFile(directory.metrics, state.step, engine.loggers),
        Progress(run, engine.data, state),
    ]
    if run.diagnostics.every:
        observers.append(from_lab("lm.lab.measures.diagnostics.Diagnostics")(engine))
    if run.prompts and run.validation.every:
        observers.append(from_lab("lm.lab.measures.samples.SamplesFile")(engine))
    return observers


# --- the loop


def fit(engine: Engine, signals: Signals) -> None:
    """Train until the run ends by its steps or its patience. Raises Interrupted after a signal, or Diverged.

    The last step has no row here: its row is written with the final score.
    """
    run, state, fabric, directory = engine.run, engine.state, engine.fabric, engine.directory
    is_first, observers = fabric.is_global_zero, observers_of(engine)
    started = time.perf_counter() - state.seconds  # as if this process had made all steps
    while state.ended_by is None:
        step = engine.step(observers)
        if state.step == run.steps:
            state.ended_by = "steps"
        logs = state.step % run.trainer.log_every_n_steps == 0
        saves = state.step % run.checkpoint.every == 0
        is_due = run.validation.every and state.step % run.validation.every == 0
        validates = is_due and not state.ended_by

        row: dict[str, float] = {}
        if logs or saves or validates or state.ended_by:  # a step that is not finite is not saved
            row = state.last_row = engine.finite_row(step)
        if validates:
            scores = engine.validate(state.eval_net, run.validation.batches)
            row = row | validation_metrics(scores, engine.data)
            state.update_best(scores.loss, keeps=is_first and run.checkpoint.best)
            if patience := run.checkpoint.patience:
                is_over = state.step - state.best_step >= patience * run.validation.every
                if fabric.broadcast(is_over):  # the first process decides for all
                    state.ended_by = "patience"
        state.seconds = time.perf_counter() - started  # where numbers were read, a GPU has caught up
        for observer in observers:
            observer.after_step(step, row if (logs or validates) and not state.ended_by else {})

        interruption = None
        if fabric.world_size == 1 or logs or state.ended_by:  # several processes have to agree, which takes time
            interruption = signals.arrived(fabric, state.step)
        if interruption and not row:
            engine.finite_row(step)  # no checkpoint of a step that is not finite
        if interruption or saves or state.ended_by:
            if is_first:
                rows = (*directory.path.glob("*.csv"), *directory.path.glob("*.jsonl"))
                sync_files(rows)  # a checkpoint must not be newer than the rows on disk
                state.save(directory.checkpoints, run.checkpoint.keep)
            fabric.barrier()
        if interruption:
            raise interruption
    if interruption := signals.arrived(fabric, state.step):
        raise interruption


# --- the end of a run


def finish(engine: Engine) -> dict[str, Any]:
    """Score the model on the whole validation text; write the last row, model/ and, last, result.json."""
    run, data, state, directory = engine.run, engine.data, engine.state, engine.directory
    if state.ended_by != "steps":
        _, epochs = readings(run, data, state.step)
        log.info("ended by %s after step %s: the text was read %.1f times", state.ended_by, f"{state.step:,}", epochs)
    net, step = state.eval_net, state.step
    scores = last = engine.validate(merged(net))
    engine.append_last_row(state.last_row | validation_metrics(last, data))
    check_finite(run, f"the validation loss is {last.loss}", last.loss)
    if state.best is not None:  # the best estimate may not be the best on the whole text
        best = state.best_net()
        best_scores = engine.validate(merged(best))
        if best_scores.loss < last.loss:
            net, step, scores = best, state.best_step, best_scores
    model = merged(net)
    samples = from_lab("lm.lab.measures.samples.draw_samples", default=no_samples)(
        model, data, run.prompts, is_finished=True
    )
    result = build_result(run, engine.settings, engine.cost, data, state, scores, samples)
    if run.checkpoint.best:
        result["best"] = {"step": step, "val_loss": scores.loss, "last_val_loss": last.loss}
        if step != state.step:
            message = "saved the best model: step %d, val_loss %.4f (last step: %.4f)"
            log.info(message, *result["best"].values())
    log_baseline(result)
    save_model(model, data.tokenizer, directory.model)
    if run.model.adapted:
        from_lab("lm.lab.formats.adapter.save_adapter")(net, run.init_from, directory.adapter)
    write_json(directory.result, result)
    if engine.loggers:
        from_lab("lm.lab.trackers.log_result")(engine.loggers, engine.settings, result)
    return result


def merged(net: Transformer) -> Transformer:
    """Return a model of plain projections that computes the same as a model with adapters."""
    if not net.config.adapted:
        return net
    return from_lab("lm.lab.lora.merged")(net)


def no_samples(*_: Any, **__: Any) -> list[dict[str, str]]:
    return []


def save_unfinished(engine: Engine) -> None:
    """Save the best model, if the run keeps it, or the last one, so that a stopped run can generate."""
    state, directory = engine.state, engine.directory
    net = state.eval_net
    if state.best is not None:
        net = state.best_net()
        message = "saved the best model so far: step %d, val/loss %.4f"
        log.info(message, state.best_step, state.best_loss)
    save_model(merged(net), engine.data.tokenizer, directory.model)
