"""Settings under the names that they had in earlier versions, and under the names that other programs give them.

In a file of an earlier version an old name is read as the current one; on a command line it is refused
with an error that gives the current one.
"""

from collections.abc import Mapping
from typing import Any

from lm.config.checks import BadInput

FORMAT = 2  # of config.yaml; 1, which it does not say, has the earlier names

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

COLUMNS = {"lookup_grad": "embedding_grad", "table_norm": "embedding_norm"}  # of diagnostics.csv, old to new

ELSEWHERE = {  # a name in other programs -> ours; a command suggests only settings that it has
    **dict.fromkeys(("learning_rate", "max_lr", "lr"), "optim.lr"),
    **dict.fromkeys(("min_lr", "final_lr"), "optim.final_lr_fraction"),
    **dict.fromkeys(("warmup", "warmup_iters"), "optim.warmup_steps"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), "optim.decay"),
    **dict.fromkeys(("beta1", "beta2"), "optim.betas"),
    **dict.fromkeys(("n_layer", "num_layers", "num_hidden_layers"), "model.n_layers"),
    **dict.fromkeys(("n_head", "num_heads", "num_attention_heads"), "model.n_heads"),
    **dict.fromkeys(("n_kv_head", "num_key_value_heads"), "model.n_kv_heads"),
    "head_dim": "model.d_head",
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon"), "model.norm_eps"),
    **dict.fromkeys(("n_embd", "embed_dim", "hidden_size", "d_embed"), "model.d_model"),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), "model.d_ff"),
    **dict.fromkeys(("activation", "hidden_act"), "model.ffn"),
    **dict.fromkeys(("tie_weights", "tie_word_embeddings"), "head"),
    **dict.fromkeys(("block_size", "context_length", "max_seq_len", "n_ctx", "n_positions"), "data.seq_len"),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "data.batch_size"),
    **dict.fromkeys(("dataset", "dataset_name", "train_file"), "data.path"),
    **dict.fromkeys(("dataset_config", "dataset_config_name", "subset"), "data.name"),
    "validation_file": "data.val_path",
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_epochs"), "max_tokens or trainer.max_steps"),
    **dict.fromkeys(("max_iters", "num_steps", "steps"), "trainer.max_steps"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), "trainer.accumulate_grad_batches"),
    **dict.fromkeys(("grad_clip", "max_grad_norm"), "trainer.gradient_clip_val"),
    **dict.fromkeys(("dtype", "bf16", "fp16"), "trainer.precision"),
    **dict.fromkeys(("log_interval", "logging_steps"), "trainer.log_every_n_steps"),
    **dict.fromkeys(("eval_interval", "eval_every", "eval_steps"), "validation.every"),
    **dict.fromkeys(("save_interval", "save_every", "save_steps"), "checkpoint.every"),
    **dict.fromkeys(("ckpt_path", "resume_from", "resume_from_checkpoint", "checkpoint_path"), "run_dir"),
    **dict.fromkeys(("out_dir", "output_dir"), "output_dir or run_dir"),
    **dict.fromkeys(("random_seed", "manual_seed"), "seed"),
    **dict.fromkeys(("max_length", "length"), "data.seq_len or max_new_tokens"),
    "optimizer": "optim",
    "device": "trainer.accelerator",
    "gradient_checkpointing": "activation_checkpointing",
    "wandb": "logger",
    "model": "run_dir",
    "text": "data.path or prompt",
    "do_sample": "temperature",
}
CHOICES_ELSEWHERE = {  # group -> choice of other programs -> ours
    "data": {"jsonl": "json", "txt": "text", "huggingface": "hub"},
    "tokenizer": {"character": "char", "bytes": "byte"},
    "optim": {"adam": "adamw"},
    "trainer": {"cuda": "gpu"},
    "logger": {"tb": "tensorboard"},
    "head": {"shared": "tied", "untie": "untied"},
}


def current(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings that an earlier version may have written, nested or with dotted keys, under today's names."""
    if not prefix and (number := settings.get("format", 1)) not in (1, FORMAT):
        raise BadInput(f"format={number}: this version reads 1 and {FORMAT}")
    found = {}
    for old, value in settings.items():
        new = KEYS.get(f"{prefix}{old}", f"{prefix}{old}")
        if isinstance(value, Mapping):
            value = current(value, f"{prefix}{old}.")
        elif isinstance(value, str):
            value = CHOICES.get(new, {}).get(value, value)
        found[new.removeprefix(prefix)] = value
    return found


def current_column(name: str) -> str:
    """A column of diagnostics.csv, such as table_norm/band1, under today's name."""
    kind, slash, band = name.partition("/")
    return f"{COLUMNS.get(kind, kind)}{slash}{band}"


def current_word(word: str) -> str:
    """An override such as head.table_lr=8.5 under today's names."""
    key, equals, value = word.partition("=")
    name = key.lstrip("+~")
    new = KEYS.get(name, name)
    return f"{key[: len(key) - len(name)]}{new}{equals}{CHOICES.get(new, {}).get(value, value)}"


def earlier(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with dotted keys under the names that they had before format 2."""
    keys, heads = ({new: old for old, new in names.items()} for names in (KEYS, HEADS))
    return {
        keys.get(key, key): heads.get(value, value) if key in CHOICES and isinstance(value, str) else value
        for key, value in settings.items()
    }
