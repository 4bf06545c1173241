"""The end of a run: which model it is, what that scores, and the content of result.json."""

import logging
import platform
from copy import deepcopy
from importlib.metadata import version
from typing import Any

import torch

from lm.config import RunConfig
from lm.data.tokens import TextData
from lm.formats.folder import merged, read_weights, save_model
from lm.inference.evaluate import Scores, validate
from lm.model.size import flops_per_token, n_params, n_params_by_role, n_params_trained
from lm.model.transformer import Transformer
from lm.system.device import cpu_name
from lm.training.optim import step_flops
from lm.training.progress import shows_bar
from lm.training.run_directory import RunDirectory
from lm.training.samples import is_copied
from lm.training.state import State

PACKAGES = ("torch", "lightning", "hydra-core", "tokenizers", "datasets", "numpy", "safetensors")
log = logging.getLogger(__name__)


def size_of(net: Transformer, run: RunConfig) -> dict[str, Any]:
    """What a model and its training cost."""
    return {
        "n_params": n_params(net),
        "n_params_trained": n_params_trained(net),
        "n_params_by_role": n_params_by_role(net),
        "flops_per_token": flops_per_token(net) + step_flops(net, run.optim, run.head) // run.tokens_per_step,
    }


def build_result(
    run: RunConfig,
    settings: dict[str, Any],
    size: dict[str, Any],
    data: TextData,
    state: State,
    scores: Scores,
    samples: list[dict[str, str]],
) -> dict[str, Any]:
    """The scores and the cost of a run, and what is needed to repeat it."""
    tokens, device = state.step * run.tokens_per_step, run.trainer.accelerator
    return {
        "val_loss": scores.loss,
        "val_bpb": scores.bpb(data.val_bytes),
        "val_top1": scores.top1,
        "val_tokens": scores.n_tokens,
        "val_bytes": data.val_bytes,
        "train_text_tokens": len(data.train),
        "baselines_bpb": data.baselines,
        "ngram_share": data.ngram_share,
        **size,
        "steps": state.step,
        "ended_by": state.ended_by,
        "tokens": tokens,
        "seconds": state.seconds,
        "tokens_per_second": tokens / state.seconds,
        "best": None,  # with checkpoint.best: the step of the model and its loss beside that of the last step
        "seed": run.seed,
        "head": run.head.name,
        "init_from": settings["init_record"],
        "resumed_from": state.resumed_from,
        **{key: settings[key] for key in ("config_hash", "data_hash", "data_revision", "tokenizer_hash", "threads")},
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "cpu": cpu_name(),
        "precision": run.trainer.precision,
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "samples": samples,
        "copied": bool(samples) and is_copied(samples[0]["drawn"], data),  # what is drawn, from the training text
    }


def final_model(
    state: State, run: RunConfig, data: TextData, directory: RunDirectory
) -> tuple[Transformer, Scores, Scores]:
    """The model of the run, with its adapters, its scores on the whole validation text, and those of the last step.

    They are the same, unless the run keeps its best model and that is better on the whole text too.
    """
    net = state.eval_net
    last = validate(merged(net), run, data, bar=shows_bar(run))
    if not state.best_sha256:
        return net, last, last
    best = best_model(state, directory)
    scores = validate(merged(best), run, data, bar=shows_bar(run))
    return (best, scores, last) if scores.loss < last.loss else (net, last, last)


def best_model(state: State, directory: RunDirectory) -> Transformer:
    """The model of the step of the lowest val/loss."""
    best = deepcopy(state.eval_net)
    best.load_state_dict(read_weights(state.best_file(directory.checkpoints), best.state_dict()))
    return best


def save_unfinished(state: State, data: TextData, directory: RunDirectory) -> None:
    """Save the best model, if the run keeps it, or the last one, so that a run without a result can generate."""
    net = state.eval_net
    if state.best_sha256:
        net = best_model(state, directory)
        step, loss = state.best_step, state.best_loss
        log.info("model/ is that of step %d, whose val/loss %.4f is the lowest so far", step, loss)
    save_model(merged(net), data.tokenizer, directory.model)
