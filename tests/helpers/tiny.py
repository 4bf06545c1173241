"""A tiny model with every head, a run of seconds, and the small text that the run reads."""

from dataclasses import replace

from lm.config import HEAD_SETTINGS, HeadConfig, ModelConfig
from lm.config import HEADS as KINDS

TINY = ModelConfig(n_layers=2, d_model=32, n_heads=4, d_ff=64, ffn="relu2")
TIED = HeadConfig(embedding_std=0.02)
UNTIED = HeadConfig(name="untied", kind="untied", embedding_std=1.0, head_std=0.01, head_lr_multiplier=1.0)
HEADS = {
    "tied": TIED,
    "untied": UNTIED,
    "tied_scaled": HeadConfig(name="tied_scaled", embedding_std=0.02, embedding_multiplier=None),
    **{
        kind: HeadConfig(name=kind, kind=kind, embedding_std=0.02, head_lr_multiplier=1.0)
        for kind in ("tied_projected", "untied_from_embedding")
    },
    "untied_midtraining": HeadConfig(
        name="untied_midtraining", kind="untied_midtraining", embedding_std=0.02, head_lr_multiplier=1.0, untie_at=0.5
    ),
}
EVERY_HEAD = HEADS | {  # with any further kind of HEAD_SETTINGS in lm/config.py, whose first loss is near ln V
    kind: HeadConfig(name=kind, kind=kind, embedding_std=0.02, **dict.fromkeys(HEAD_SETTINGS[kind], 0.01))
    for kind in KINDS
    if kind not in HEADS
}
VOCAB, SEQ = 97, 16


def tiny(**changes):
    return replace(TINY, **changes)


# a run of seconds; tests add words to it
TINY_RUN = [
    *("experiment=none", "data=text", "data.seq_len=32", "data.batch_size=4", "tokenizer=byte"),
    *("model.n_layers=2", "model.d_model=32", "model.n_heads=2", "model.d_ff=64"),
    *("trainer=cpu", "trainer.max_steps=20", "trainer.log_every_n_steps=1", "threads=1", "prompts=[]"),
    *("checkpoint.every=5", "validation.every=10", "validation.batches=2"),
]


# about nine kilobytes
TEXT = "".join(f"def f{i}(x, y):\n    return x * {i * 7 % 31} + y  # {i:x}\n" for i in range(200))


WHOLE_RESULT = {  # the keys of a result.json
    **dict.fromkeys(("val_loss", "val_bpb", "val_top1", "seconds", "tokens_per_second"), 1.0),
    **dict.fromkeys(("n_params", "n_params_trained", "flops_per_token", "steps", "tokens", "seed", "threads"), 1),
    **dict.fromkeys(("head", "config_hash", "data_hash", "tokenizer_hash"), "x"),
    **dict.fromkeys(("device", "cpu", "precision", "python"), "x"),
    **dict.fromkeys(("val_tokens", "val_bytes", "train_text_tokens"), 1),
    "n_params_by_role": {"embedding": 1},
    "baselines_bpb": {"ngram": 2.0},
    "resumed_from": [],
    "ended_by": "steps",
    "best": None,
    "versions": {"torch": "2"},
    "samples": [],
    "copied": 0.0,
}
