"""The model of a run, before its training."""

from lm.config import RunConfig
from lm.model.transformer import Transformer, enable_activation_checkpointing


def build_model(run: RunConfig, vocab_size: int, eot: int = 0) -> Transformer:
    """`eot`: the id of the token that begins each document. The default serves where only the cost of a step counts."""
    net = Transformer(
        run.model,
        run.head,
        vocab_size=vocab_size,
        seq_len=run.data.seq_len,
        document_separator=eot if run.data.document_mask else None,
        seed=run.seed,
    )
    if run.activation_checkpointing:
        enable_activation_checkpointing(net)
    return net
