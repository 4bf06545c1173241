"""What people and other programs call the settings and the commands: it is looked up before spellings are compared."""

from collections.abc import Container

from lm.config.model import CLASSES

# A setting -> the words for it. It is meant where the command has it, and those named behind it; the first row counts.
WORDS = {
    "trainer.max_steps": "step steps iter iters iterations max_iters max_iterations num_iterations num_steps n_steps"
    " train_steps training_steps total_steps num_train_steps updates",
    "max_minutes": "minutes mins hours time max_time time_limit",
    "max_tokens": "tokens n_tokens num_tokens train_tokens total_tokens",
    "optim.lr": "lr learning_rate learningrate learn_rate max_lr peak_lr",
    "optim.weight_decay": "wd l2 weightdecay",
    "optim.warmup_steps": "warmup warmup_iters num_warmup_steps",
    "optim.decay": "schedule scheduler lr_schedule lr_scheduler lr_scheduler_type lr_decay",
    "optim": "optimizer optimiser opt",
    "trainer.gradient_clip_val": "clip grad_clip clip_grad gradient_clip gradient_clipping max_grad_norm",
    "trainer.accumulate_grad_batches": "accumulate accumulation grad_accum gradient_accumulation"
    " gradient_accumulation_steps",
    "trainer.accelerator": "device backend cuda",
    "trainer": "cpu gpu",
    "trainer.devices": "gpus n_gpus num_gpus n_devices num_devices",
    "trainer.precision": "precision dtype torch_dtype amp mixed_precision bf16 fp16 fp32 float32 half",
    "trainer.strategy": "ddp distributed",
    "trainer.enable_progress_bar": "progress progress_bar bar verbose quiet silent q no_progress",
    "trainer.log_every_n_steps": "log_every log_interval logging_steps",
    "model.n_layers": "layers layer n_layer nlayers num_layers num_hidden_layers depth n_blocks",
    "model.n_heads": "heads n_head nheads num_heads num_attention_heads attention_heads",
    "model.d_model": "width dim dmodel hidden hidden_size hidden_dim n_embd n_embed embed_dim embedding_dim emb_dim",
    "model.n_kv_heads": "kv_heads num_kv_heads num_key_value_heads n_query_groups",
    "model.d_ff": "ff ff_dim ffn_dim d_ffn mlp_dim intermediate_size",
    "model.dropout": "drop dropout_rate p_drop",
    "model.ffn": "activation act act_fn hidden_act activation_function nonlinearity mlp gelu relu swiglu",
    "model.norm": "normalization normalisation norm_type layernorm rmsnorm",
    "model.position": "pos pos_emb position_embedding positional positional_encoding position_embedding_type rope",
    "model.rope_theta": "theta rope_base",
    "model.linear": "lora",
    "model.lora_rank": "r rank lora_r",
    "seq_len": "context context_length context_len context_size ctx n_ctx block_size window",
    "data.seq_len": "context context_length context_len context_size ctx n_ctx block_size window seq seqlen seq_length"
    " sequence_length max_seq_len max_length",
    "data.batch_size": "batch bs batchsize micro_batch_size train_batch_size per_device_train_batch_size",
    "data.val_path trainer": "val valid val_file val_data validation_file validation_data valid_file eval_file test"
    " test_file",
    "data.separator": "sep delimiter document_separator",
    "data.column": "col field text_column text_field text_key",
    "data.max_bytes": "limit n_bytes max_size",
    "data.val_fraction": "val_frac val_ratio val_split validation_fraction validation_split test_size",
    "data.path": "data dataset text file input corpus path data_path data_file data_dir train_file train_data txt url"
    " val valid val_file val_data test test_file",
    "tokenizer.vocab_size": "vocab vocabulary n_vocab vocabsize vocabulary_size",
    "tokenizer.path": "tokenizer_path tokenizer_file",
    "validation.every": "val_every eval_every val_interval eval_interval eval_steps validate_every",
    "validation.batches": "val_batches eval_batches eval_iters",
    "checkpoint.every": "save_every save_interval save_steps checkpoint_every checkpoint_interval",
    "checkpoint.keep": "save_total_limit keep_last max_checkpoints",
    "checkpoint.best": "save_best keep_best load_best_model_at_end",
    "checkpoint.patience": "early_stopping early_stop",
    "activation_checkpointing": "gradient_checkpointing grad_checkpointing checkpointing recompute remat",
    "head": "tie tied tying tie_weights tied_weights weight_tying tie_embeddings tie_word_embeddings",
    "model": "size",
    "logger": "tracker report_to wandb tensorboard",
    "init_from": "pretrained from_pretrained finetune finetune_from load_from resume_from base_model weights from init",
    "ablation.seeds": "seeds n_seeds num_seeds",
    "ablation.equivalence_margin": "margin equivalence tolerance",
    "ablation.tune.trials": "tune tuning n_trials tune_trials",
    "workers": "jobs n_jobs parallel num_workers n_workers",
    "plan_only": "dry_run dryrun dry plan",
    "seed": "seeds random_seed rng_seed manual_seed",
    "threads": "num_threads n_threads cores n_cores cpus workers jobs n_jobs num_workers n_workers",
    "temperature": "temp t greedy",
    "max_new_tokens": "length max_length max_len n tokens n_tokens num_tokens max_tokens new_tokens",
    "n_samples": "samples num_samples num_return_sequences",
    "top_k": "k topk",
    "top_p": "topp nucleus",
    "prompt": "text input start query message p",
    "prompts": "prompt",
    "prompt_file": "file input_file prompt_path",
    "interactive": "chat repl",
    "output_dir": "o out out_dir outdir output save_dir name run_name dir",
    "run_dir trainer": "o out out_dir outdir output output_dir save_dir name run_name dir run log_dir logdir resume"
    " continue restart",
    "run_dir": "run runs model model_dir model_path checkpoint ckpt load name dir path",
    "dtype": "quant quantize quantization precision bits",
    "format": "type to",
    "where": "filter query",
    "rows": "csv file input path",
    "baseline": "base reference control",
    "higher": "higher_is_better maximize greater_is_better",
    "open": "browser",
}
NAMES_OF_VALUES = {"cpu", "gpu", "cuda", "wandb", "tensorboard", "ddp"}.union(*CLASSES.values())
EPOCHS = ("epoch", "epochs", "n_epochs", "num_epochs", "max_epochs", "num_train_epochs")
EXPERIMENT = ("experiment", "recipe", "preset")  # a group without settings of its own
RESUME = ("resume", "continue", "restart")
# A command -> the words for it.
COMMAND_WORDS = {
    "generate interactive=true": "chat sample talk repl play",
    "generate": "gen complete predict infer inference",
    "train": "fit pretrain learn run start new init",
    "train -m": "sweep multirun grid",
    "evaluate": "eval test score validate perplexity",
    "ablate": "compare question ask vs",
    "runs": "list ls status show history",
    "look": "ui gui view web serve browse dashboard",
    "export": "convert save",
}


def meaning(key: str, value: str, kinds: Container[str]) -> tuple[str, str] | None:
    """The setting that an everyday word means in a command with the settings `kinds`, and the value that it gets.

    A word behind a dot, as in model.layers, means a setting behind a dot.

    >>> meaning("--learning-rate".strip("-"), "0.1", ["optim.lr"]), meaning("device", "cuda:0", ["trainer.accelerator"])
    (('optim.lr', '0.1'), ('trainer.accelerator', 'cuda'))
    """
    group, _, word = key.lower().replace("-", "_").rpartition(".")
    for row, words in WORDS.items():
        setting = row.split()[0]
        if word in words.split() and all(name in kinds for name in row.split()) and ("." in setting or not group):
            return setting, _adapted(setting, word, value)
    return None


def _adapted(setting: str, word: str, value: str) -> str:
    """The value in the words of the setting."""
    is_off = value.lower() in ("false", "0", "no", "off")
    if setting == "head":
        return {"true": "tied", "false": "untied"}.get(value.lower(), value)
    if setting == "trainer.precision":
        return "32-true" if is_off or "32" in value else "bf16-mixed"
    if word in ("quiet", "silent", "q", "no_progress"):
        return "true" if is_off else "false"
    if word == "greedy":
        return "VALUE" if is_off else "0"
    if word in NAMES_OF_VALUES:
        return "VALUE" if is_off else word
    if setting == "trainer.accelerator":
        return value.partition(":")[0]
    if word == "hours":
        return f"{60 * float(value):g}" if value.replace(".", "", 1).isdecimal() else "VALUE"
    if setting == "ablation.seeds" and value.isdecimal() and int(value) <= 100:
        return f"[{','.join(map(str, range(int(value))))}]"
    return value


def command_of(word: str) -> list[str]:
    """The words that a command begins with which is called otherwise here; empty if none is."""
    return next((row.split() for row, words in COMMAND_WORDS.items() if word.lower() in words.split()), [])
