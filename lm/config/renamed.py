"""Settings under the names that they had in earlier versions, and under the names that other programs give them.

In a file of an earlier version an old name is read as today's; on a command line it is refused with today's.
"""

from collections.abc import Mapping
from typing import Any

KEYS = {  # of a run and of an ablation, old to new
    "recompute": "activation_checkpointing",
    "head.table_lr": "head.embedding_lr_multiplier",
    "head.lookup_scale": "head.embedding_multiplier",
    "head.table_std": "head.embedding_std",
    "head.head_lr": "head.head_lr_multiplier",
    "head.split_at": "head.untie_at",
    "model.lookback": "model.previous_token_init",
    "model.residual_init": "model.residual_scale",
    "optim.final_lr": "optim.final_lr_fraction",
    "optim.rounds": "optim.ns_steps",
    "ablation.matters": "ablation.equivalence_margin",
    "ablation.against": "ablation.baselines",
    "ablation.match": "ablation.match_parameters",
    "ablation.reseed": "ablation.seed_offsets",
    "ablation.curve": "ablation.plot_over",
    "ablation.tune.knobs": "ablation.tune.hyperparameters",
    "ablation.tune.widening": "ablation.tune.extension_trials",
}
HEADS = {"split": "untied_midtraining", "untied_copied": "untied_from_embedding"}
CHOICES = {"head": HEADS, "head.kind": HEADS, "head.name": HEADS}  # key -> old to new

ELSEWHERE = {  # what other programs call a setting
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "max_lr": "optim.lr",
    "device": "trainer.accelerator",
    "epochs": "max_tokens or trainer.max_steps",
    "num_train_epochs": "max_tokens or trainer.max_steps",
    "max_iters": "trainer.max_steps",
    "block_size": "data.seq_len",
    "context_length": "data.seq_len",
    "n_embd": "model.d_model",
    "hidden_size": "model.d_model",
    "n_layer": "model.n_layers",
    "n_head": "model.n_heads",
    "dtype": "trainer.precision",
    "grad_clip": "trainer.gradient_clip_val",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "output_dir": "run_dir",
}
CHOICES_ELSEWHERE = {"data": {"jsonl": "json"}, "tokenizer": {"character": "char"}, "optim": {"adam": "adamw"}}


def current(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings that an earlier version may have written, nested or with dotted keys, under today's names."""
    found = {}
    for old, value in settings.items():
        new = KEYS.get(prefix + old, prefix + old)
        if isinstance(value, Mapping):
            value = current(value, f"{prefix}{old}.")
        elif isinstance(value, str):
            value = CHOICES.get(new, {}).get(value, value)
        found[new.removeprefix(prefix)] = value
    return found


def current_word(word: str) -> str:
    """An override such as head.table_lr=8.5 under today's names."""
    key, equals, value = word.partition("=")
    name = key.lstrip("+~")
    new = KEYS.get(name, name)
    return f"{key[: len(key) - len(name)]}{new}{equals}{CHOICES.get(new, {}).get(value, value)}"
