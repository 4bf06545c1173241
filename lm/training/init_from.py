"""The weights of a run that starts from a finished one (init_from)."""

import logging
import math
from dataclasses import asdict, replace
from typing import Any

from lm.config import BadInput, RunConfig
from lm.data.tokens import TextData
from lm.exchange.base import Base, agrees, read_base
from lm.exchange.portable import load_model
from lm.inference.evaluate import evaluate
from lm.model.transformer import Transformer

log = logging.getLogger(__name__)


def with_hash(run: RunConfig) -> RunConfig:
    """The run with the hash of the weights that it starts from, which is part of its identity."""
    run.check_base()
    if run.init_from is None:
        if given := [key for key in ("init_sha256", "init_tied_matrix") if getattr(run, key) is not None]:
            raise BadInput(f"{given[0]}={getattr(run, given[0])}: is for a run with init_from")
        return run
    return run if run.init_sha256 else replace(run, init_sha256=read_base(run.init_from).sha256)


def load_base(net: Transformer, run: RunConfig, data: TextData, accelerator: str) -> dict[str, Any]:
    """Give `net` the weights that `run.init_from` names; returns where they came from, for result.json.

    Its record has the loss on the validation batches of `run` before the first step and, if the head is another one,
    before its conversion. Raises BadInput for other weights than run.init_sha256, another model or another tokenizer.
    """
    assert run.init_from is not None
    base = read_base(run.init_from)
    if run.init_sha256 not in (None, base.sha256):
        found = f"its weights have the hash {base.sha256[:16]}, this run starts from {str(run.init_sha256)[:16]}"
        raise BadInput(f"init_from={run.init_from}: {found}; give the run that has them")
    refuse_other_model(run, base)
    loaded, tokenizer = load_model(base.folder, trust=True)  # run.model.linear, which is the same class, was typed
    if tokenizer.hash != data.tokenizer.hash:
        raise BadInput(
            f"tokenizer: init_from={run.init_from} has another one; set tokenizer.path={base.tokenizer.path}"
        )
    net.load_from(loaded, run.init_tied_matrix)
    record = base.record(run.init_from)

    def loss(model: Transformer) -> float:
        batches = run.validation.batches
        device = {"gpu": "cuda"}.get(accelerator, accelerator)
        return evaluate(model.to(device), data.val, run.data.seq_len, run.data.batch_size, batches).loss

    record["val_loss"] = loss(net)
    if not math.isfinite(record["val_loss"]):
        raise BadInput(f"init_from={run.init_from}: its loss is {record['val_loss']}; expected weights of a model")
    said = f"starts from {run.init_from}, with a validation loss of {record['val_loss']:.4f}"
    if (loaded.head_config.kind, loaded.embed.multiplier) != (run.head.kind, net.embed.multiplier):
        loaded.seq_len, loaded.documents = net.seq_len, net.documents  # it has the positions: net took them over
        record["val_loss_before_conversion"] = loss(loaded)
        said += f" ({record['val_loss_before_conversion']:.4f} before its head became {run.head.name})"
    log.info("%s", said)
    return record


def refuse_other_model(run: RunConfig, base: Base) -> None:
    for key, loaded in asdict(base.settings.model).items():
        if not agrees(key, own := getattr(run.model, key), loaded):
            raise BadInput(f"model.{key}={own}: init_from={run.init_from} has {loaded}")
