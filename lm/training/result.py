"""The final score of a run and the content of result.json."""

import math
import platform
from importlib.metadata import version
from typing import Any

import torch
from lightning import Trainer

from lm.config import Diverged, RunConfig
from lm.data.tokens import TextData
from lm.inference.evaluate import Scores, evaluate
from lm.model.transformer import Transformer
from lm.system.device import cpu_name
from lm.training.callbacks import TrainingCallback
from lm.training.metrics import validation_metrics
from lm.training.samples import samples

FROM_SETTINGS = ("config_hash", "data_hash", "data_revision", "tokenizer_hash", "threads")
PACKAGES = ("torch", "lightning", "hydra-core", "tokenizers", "datasets", "numpy", "safetensors")


def final_score(
    run: RunConfig, net: Transformer, data: TextData, trainer: Trainer, callback: TrainingCallback, bar: bool
) -> Scores:
    """Score the whole validation text and log the row of the last step with it. Raises Diverged."""
    with callback.stopping_at_once():
        net.to(trainer.strategy.root_device)  # Lightning has moved it to the CPU
        scores = evaluate(net, data.val, run.data.seq_len, run.data.batch_size, bar=bar)
    if not math.isfinite(scores.loss):
        advice = f"choose optim.lr below {run.optim.lr} or a lower trainer.gradient_clip_val"
        raise Diverged(f"the validation loss is {scores.loss}: {advice}")
    for logger in trainer.loggers:
        logger.log_metrics(callback.last_metrics | validation_metrics(scores, data), trainer.global_step)
        logger.finalize("success")  # again: the Trainer has finished
    return scores


def build_result(
    run: RunConfig,
    settings: dict[str, Any],
    size: dict[str, Any],
    net: Transformer,
    data: TextData,
    trainer: Trainer,
    callback: TrainingCallback,
    scores: Scores,
) -> dict[str, Any]:
    """The scores and the cost of a run, and what is needed to repeat it."""
    seconds, device = callback.seconds, trainer.strategy.root_device
    tokens = trainer.global_step * callback.tokens_per_step
    return {
        "val_loss": scores.loss,
        "val_bpb": scores.bpb(data.val_bytes),
        "val_top1": scores.top1,
        "val_tokens": scores.n_tokens,
        "val_bytes": data.val_bytes,
        "train_text_tokens": len(data.train),
        "baselines_bpb": data.baselines,
        **size,
        "steps": trainer.global_step,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "seed": run.seed,
        "head": run.head.name,
        "init_from": settings.get("base"),
        "resumed_from": callback.resumed_from,
        **{key: settings[key] for key in FROM_SETTINGS},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "cpu": cpu_name(),
        "precision": str(trainer.precision),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "samples": samples(net, data, run.prompts),
    }
