"""What a finished run leaves: result.json, with the scores, the cost, and what is needed to repeat the run."""

import platform
from importlib.metadata import version
from typing import Any

import torch

from lm.config import RunConfig
from lm.data.tokens import TextData
from lm.model.size import flops_per_token, n_params, n_params_by_role, n_params_trained
from lm.model.transformer import Transformer
from lm.scoring import Scores
from lm.system.device import cpu_name
from lm.training.optim import step_flops
from lm.training.state import State

SETTINGS = ("config_hash", "data_hash", "data_revision", "tokenizer_hash", "threads", "code")
PACKAGES = ("torch", "lightning-fabric", "hydra-core", "tokenizers", "datasets", "numpy", "safetensors")


def cost_of(net: Transformer, run: RunConfig) -> dict[str, Any]:
    """Return what a model and its training cost."""
    return {
        "n_params": n_params(net),
        "n_params_trained": n_params_trained(net),
        "n_params_by_role": n_params_by_role(net),
        "flops_per_token": flops_per_token(net) + step_flops(net, run.optim, run.head) // run.tokens_per_step,
    }


def build_result(
    run: RunConfig,
    settings: dict[str, Any],
    cost: dict[str, Any],
    data: TextData,
    state: State,
    scores: Scores,
    samples: list[dict[str, str]],
) -> dict[str, Any]:
    """Return the scores and the cost of a run, and what is needed to repeat the run."""
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
        "copied": data.copied,  # share of the validation text that stands in the training text
        **cost,
        "steps": state.step,
        "ended_by": state.ended_by,
        "tokens": tokens,
        "seconds": state.seconds,
        "tokens_per_second": tokens / state.seconds,
        "best": None,  # `finish` sets it with checkpoint.best: step and loss of the model, loss of the last step
        "seed": run.seed,
        "head": run.head.name,
        "init_from": settings["init_record"],
        "resumed_from": state.resumed_from,
        **{key: settings[key] for key in SETTINGS},
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "cpu": cpu_name(),
        "precision": run.trainer.precision,
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "samples": samples,
    }
