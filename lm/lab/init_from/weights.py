"""The weights that a run takes from a finished model."""

import logging
import math
from dataclasses import asdict
from typing import Any

import torch

from lm.config import TIED_MATRICES, RunConfig, user_classes
from lm.data.tokens import TextData
from lm.errors import UserError
from lm.folder import load_model
from lm.lab.init_from.base import read_base
from lm.lab.measures.leakage import scored_text, texts_read, what_was_read
from lm.model.head import Embedding, Head, TiedHead, TiedProjectedHead, UntiedHead, UntiedMidTrainingHead
from lm.model.transformer import Transformer
from lm.scoring import validate
from lm.system.terminal import is_first_process

log = logging.getLogger(__name__)


def load_init_weights(net: Transformer, run: RunConfig, data: TextData) -> dict[str, Any]:
    """Give `net` the weights that `run.init_from` names. Return where the weights came from, for result.json.

    On the first process the record has the loss on the validation batches of `run` before the first step. Raises
    UserError for other weights than run.init_sha256, another model or another tokenizer.
    """
    assert run.init_from is not None
    base = read_base(run.init_from)
    if run.init_sha256 not in (None, base.sha256):
        raise UserError(f"init_from={run.init_from}: its weights have the hash {base.sha256}, not {run.init_sha256}")
    for key, value in asdict(base.settings.model).items():
        if not base.accepts(key, own := getattr(run.model, key)):
            raise UserError(f"model.{key}={own}: init_from={run.init_from} has {value}")
    typed = [*user_classes(run.model).values()]  # the classes of the loaded model are the same
    loaded, tokenizer = load_model(base.folder, classes=typed)
    if tokenizer.hash != data.tokenizer.hash:
        advice = f"set tokenizer.path={base.tokenizer.path}"
        raise UserError(f"tokenizer: init_from={run.init_from} has another one; {advice}")
    copy_weights(net, loaded, run.init_tied_matrix)
    record: dict[str, Any] = {"path": run.init_from, "sha256": base.sha256, "head": base.settings.head.name}
    record |= {"steps": base.steps, "tokens": base.tokens, "texts": texts_read(base.folder.parent)}
    if not is_first_process(run.trainer.world_size):
        return record

    if reason := what_was_read(base.folder.parent, data.val, *scored_text(run, data)):
        log.warning("validation text: the score may be too good, because init_from=%s %s", run.init_from, reason)
    net.to(run.trainer.accelerator)
    loss = validate(net, run, data, max_batches=run.validation.batches).loss
    net.cpu()
    if not math.isfinite(loss):
        raise UserError(f"init_from={run.init_from}: its loss is {loss}; expected weights of a model")
    log.info("starts from %s, with a validation loss of %.4f", run.init_from, loss)
    return record | {"val_loss": loss}


@torch.no_grad()
def copy_weights(net: Transformer, loaded: Transformer, rule: str | None = None) -> None:
    """Give `net` the weights of a model with the same ModelConfig. The head and the seq_len may differ.

    Adapters keep their values, because a finished model has no adapters. `rule` is the argument of `convert_head`.
    Raises UserError if the loaded model cannot give the seq_len or the head of `net`.
    """
    net.blocks.load_state_dict(net.blocks.state_dict() | loaded.blocks.state_dict())
    net.norm.load_state_dict(loaded.norm.state_dict())
    for name, new in net.position.named_parameters():  # a learned vector for each position
        old = loaded.position.get_parameter(name)
        can_cut = new.ndim > 0 and new.shape[1:] == old.shape[1:]
        if new.shape != old.shape and not (can_cut and len(new) < len(old)):
            choice = "that or less" if can_cut else "that"
            reason = f"the loaded model has {loaded.seq_len} learned positions"
            raise UserError(f"data.seq_len={net.seq_len}: {reason}; choose {choice}")
        new.copy_(old[: len(new)] if can_cut else old)
    for name, buffer in net.position.named_buffers():
        if buffer.shape == (old := loaded.position.get_buffer(name)).shape:  # else it depends on seq_len
            buffer.copy_(old)
    convert_head(net.embed, net.head, loaded.embed, loaded.head, rule)


def convert_head(new_embed: Embedding, new_head: Head, old_embed: Embedding, old_head: Head, rule: str | None) -> None:
    """Set the new embedding and head to compute what the old embedding and head compute.

    An untied head computes exactly the same. A head of one matrix computes the same if the old head had one matrix too.
    Otherwise `rule` says with which matrix the new head begins: embedding, head or mean. Raises UserError if `rule` is
    None then.
    """
    same = new_embed.multiplier == old_embed.multiplier
    inputs = old_embed.weight if same else old_embed.matrix() / new_embed.multiplier  # (V, D), for the new embedding
    outputs = old_head.matrix(old_embed.weight)  # (V, D)
    leave_out = f"init_tied_matrix={rule}: the loaded model has one matrix already; leave it out"
    match new_head, old_head:
        case TiedProjectedHead(), TiedHead() | TiedProjectedHead() if rule is not None:
            raise UserError(leave_out)
        case TiedProjectedHead(), TiedHead() | TiedProjectedHead():  # the projection makes up for another multiplier
            new_embed.weight.copy_(inputs)
            if isinstance(old_head, TiedProjectedHead):
                new_head.proj.weight.copy_(old_head.proj.weight)
            new_head.proj.weight.mul_(new_embed.multiplier / old_embed.multiplier)
        case TiedHead() | TiedProjectedHead() | UntiedMidTrainingHead(), _:  # the last begins its training tied
            if inputs is not outputs and rule is None:
                reason = "the input and output embeddings of the loaded model differ"
                if outputs is old_embed.weight:
                    scales = f"{new_embed.multiplier:g}, not the {old_embed.multiplier:g} of the loaded model"
                    reason = f"and its head.embedding_multiplier is {scales}"
                advice = f"choose init_tied_matrix={', '.join(TIED_MATRICES)}, or an untied head"
                raise UserError(f"head: has one matrix, {reason}; {advice}")
            if inputs is outputs and rule is not None:
                raise UserError(leave_out)
            matrices = {"embedding": inputs, "head": outputs, "mean": (inputs + outputs) / 2}
            new_embed.weight.copy_(inputs if inputs is outputs else matrices[str(rule)])
            new_head.init_from_embedding(new_embed.weight)
        case UntiedHead(), _ if rule is not None:
            raise UserError(f"init_tied_matrix={rule}: is for a head of one matrix, not {type(new_head).__name__}")
        case UntiedHead(), _:
            new_embed.weight.copy_(inputs)
            new_head.proj.weight.copy_(outputs)
        case _:
            raise UserError(f"head: {type(new_head).__name__} cannot take over the matrices of another model")
