"""Record what runs compute, and compare two records.

python scripts/equality.py record FILE.json [CHECKOUT]
python scripts/equality.py compare A.json B.json

`record` trains the runs of the table RUNS by the commands of a checkout, by default its own, two
runs at a time. `compare` prints a line for each run that differs, and exits with 1 if a run
differs. Compare records of one machine: another processor or another version of torch may round
otherwise.
"""

import csv
import hashlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ON_CPU = "data=text data.path=text.txt trainer.accelerator=cpu trainer.precision=32-true threads=1"
TINY = f"""{ON_CPU} experiment=none tokenizer=byte data.seq_len=32 data.batch_size=4
    model.n_layers=2 model.d_model=32 model.n_heads=2 model.d_ff=64 trainer.max_steps=20
    trainer.log_every_n_steps=1 checkpoint.every=5 validation.every=10 validation.batches=2"""
RECIPE = f"""{ON_CPU} trainer.max_steps=12 trainer.log_every_n_steps=1 validation.every=6
    validation.batches=2"""
DEBUG = f"{ON_CPU} experiment=none tokenizer=byte model.n_layers=2 data.seq_len=32"
HEADS = [
    *("tied", "tied_naive", "tied_projected", "tied_scaled"),
    *("untied", "untied_chars", "untied_from_embedding", "untied_midtraining"),
]
NO_LOOKBACK = "model.previous_token_init=0"  # needs RoPE and a norm
UNSTABLE = "optim.decay=constant optim.lr=0.3 optim.adam_lr=0.3"  # the loss rises again
LONG = """head=untied_midtraining model.dropout=0.1 optim.ema=0.9 checkpoint.best=true
    trainer.max_steps=150 validation.every=20 diagnostics.every=50"""

# The commands of each run, in order. The last value of a repeated key counts, and the last command
# is recorded.
RUNS: dict[str, list[str]] = {}
for head in HEADS:
    RUNS[f"{head}_adamw"] = [f"{TINY} head={head} optim=adamw"]
    RUNS[f"{head}_muon"] = [f"{TINY} head={head} optim=muon"]
RUNS |= {
    "dropout": [f"{TINY} model.dropout=0.2"],
    "no_clipping": [f"{TINY} trainer.gradient_clip_val=null optim=adamw"],
    "accumulation": [f"{TINY} trainer.accumulate_grad_batches=2"],
    "ema": [f"{TINY} optim.ema=0.9"],
    "best": [f"{TINY} checkpoint.best=true validation.every=2 {UNSTABLE}"],
    "patience": [f"{TINY} checkpoint.patience=1 validation.every=2 {UNSTABLE}"],
    "documents": [f"{TINY} data.separator=ENDTEXT data.document_mask=true data.order=documents"],
    "diagnostics": [f"{TINY} diagnostics.every=5 head=tied_scaled"],
    "chunked": [f"{TINY} loss=chunked data.batch_size=32"],
    "ngram_smoothing": [f"{TINY} ngram_smoothing=0.5"],
    "loss_temperature": [f"{TINY} loss_temperature=0.8"],
    "learned_positions": [f"{TINY} model.position=learned {NO_LOOKBACK}"],
    "layernorm_bias_gelu": [f"{TINY} model.norm=layernorm model.bias=true model.ffn=gelu"],
    "post_norm_relu2": [f"{TINY} model.norm_order=post model.ffn=relu2"],
    "no_norm_gelu_tanh": [
        f"{TINY} model.norm=none model.qk_norm=false model.ffn=gelu_tanh {NO_LOOKBACK}",
    ],
    "gqa_previous_token_silu": [
        f"{TINY} model.n_heads=4 model.n_kv_heads=2 model.previous_token_init=1 model.ffn=silu",
    ],
    "activation_checkpointing": [f"{TINY} activation_checkpointing=true model.dropout=0.1"],
    "lora": [TINY, f"{TINY} init_from=first model.linear=lora model.lora_rank=4 seed=1"],
    "untied_from_tied": [TINY, f"{TINY} init_from=first head=untied optim=muon_continue"],
    "tied_from_untied": [
        f"{TINY} head=untied",
        f"{TINY} init_from=first head=tied init_tied_matrix=mean optim=adamw",
    ],
    "two_processes": [
        f"{TINY} trainer.devices=2 trainer.strategy=ddp data.batch_size=2 optim=adamw",
    ],
    "char": [f"{TINY} tokenizer=char 'prompts=[on a day,it was]'"],
    "bpe": [f"{TINY} tokenizer=bpe tokenizer.vocab_size=300"],
    "uninterrupted": [f"{TINY} {LONG}"],
    "resumed": [f"{TINY} {LONG}"],  # after a signal; equals the run above
    "chars_10k": [f"{RECIPE} experiment=chars_10k"],
    "chars_30k": [f"{RECIPE} experiment=chars_30k"],
    "bpe_300k": [f"{RECIPE} experiment=bpe_300k"],
    "debug": [f"{DEBUG} trainer=debug"],
    "overfit": [f"{DEBUG} trainer=overfit trainer.max_steps=20"],
    "bf16": [f"{TINY} trainer.precision=bf16-mixed"],
    "bf16_untied_adamw": [f"{TINY} trainer.precision=bf16-mixed head=untied optim=adamw"],
}

COLUMNS = [
    *("step", "tokens", "lr", "train/loss", "train/grad_norm"),
    *("val/loss", "val/bpb", "val/top1", "val/tokens"),
]
SCORES = [
    *("val_loss", "val_bpb", "val_top1", "val_tokens", "val_bytes", "train_text_tokens"),
    *("baselines_bpb", "n_params", "flops_per_token", "steps", "tokens", "ended_by", "best"),
]


def write_text(path: Path) -> None:
    """Write about 60 kB of documents, of sentences from a vocabulary of made-up words."""
    source = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgk"
    vocabulary = ["".join(source.choices(letters, k=source.randint(2, 8))) for _ in range(400)]
    frequencies = [1 / rank for rank in range(1, len(vocabulary) + 1)]
    lines = []
    for number in range(1300):
        words = source.choices(vocabulary, frequencies, k=source.randint(4, 10))
        lines.append(" ".join(words).capitalize() + ".")
        if number % 40 == 39:
            lines.append("ENDTEXT")
    path.write_text("\n".join(lines) + "\n")


def words(line: str, run_dir: str) -> list[str]:
    """Return the words of a command, each key once, with the folder of its run."""
    settings = dict(word.split("=", 1) for word in shlex.split(line))
    return [f"{key}={value}" for key, value in {**settings, "run_dir": run_dir}.items()]


def digest(content: Any) -> str:
    """Return the sha256 of bytes, or of the JSON of other content."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return hashlib.sha256(data).hexdigest()


def digest_of_tensors(path: Path) -> str:
    """Return the sha256 of names, types, shapes and bytes in a safetensors file, by name."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:start])
    tensors.pop("__metadata__", None)
    parts = []
    for name, tensor in sorted(tensors.items()):
        begin, end = tensor["data_offsets"]
        values = digest(content[start + begin : start + end])
        parts.append([name, tensor["dtype"], tensor["shape"], values])
    return digest(parts)


def digest_of_table(path: Path, columns: list[str] | None = None) -> str:
    """Return the sha256 of the named columns of a CSV file, by default of all columns."""
    with path.open(newline="") as file:
        rows = [{name: row.get(name) for name in columns or row} for row in csv.DictReader(file)]
    return digest(rows)


class Failed(Exception):
    """A command of a run has failed."""


def command(checkout: Path, folder: Path, name: str, *arguments: str, stop: bool = False) -> str:
    """Run a command of a checkout and return its standard output.

    With `stop` a signal ends the command after the first rows of its metrics.csv. Raise Failed
    if the command ends in another way than it should.
    """
    line = [sys.executable, str(checkout / f"scripts/{name}.py"), *arguments]
    env = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    log = folder / "errors.log"
    with log.open("w") as errors, (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(line, cwd=folder, env=env, stdout=output, stderr=errors)
        metrics = folder / "run/metrics.csv"
        while stop and process.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") > 30:
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.01)
        code = process.wait(900)
    if code != (128 + signal.SIGTERM if stop else 0):
        reason = log.read_text().strip().splitlines()[-1:]
        raise Failed(f"{name} ended with {code}: {' '.join(reason)}")
    return (folder / "output.txt").read_text()


def record_run(checkout: Path, name: str) -> dict[str, Any]:
    """Make a run of the table in a new folder. Return its digests and its scores."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_text(folder / "text.txt")
        *first, last = RUNS[name]
        try:
            for line in first:
                command(checkout, folder, "train", *words(line, "first"))
            if name == "resumed":
                command(checkout, folder, "train", *words(last, "run"), stop=True)
            command(checkout, folder, "train", *words(last, "run"))
            prompt = ["prompt=on a day", "max_new_tokens=20"]
            generated = command(checkout, folder, "generate", "run_dir=run", *prompt)
        except Failed as error:
            return {"error": str(error)}
        run = folder / "run"
        result = json.loads((run / "result.json").read_text())
        texts = ("prompt", "continuation", "drawn")
        samples = [[sample[key] for key in texts] for sample in result["samples"]]
        found = {
            "metrics": digest_of_table(run / "metrics.csv", COLUMNS),
            "model": digest_of_tensors(run / "model/model.safetensors"),
            "samples": digest(samples),
            "generated": digest(generated),
            **{key: result.get(key) for key in SCORES},
        }
        if (table := run / "diagnostics.csv").exists():
            found["diagnostics"] = digest_of_table(table)
        for path in run.glob("adapter/*.safetensors"):
            found["adapter"] = digest_of_tensors(path)
        return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each run that differs between two records."""
    lines = []
    for name in dict.fromkeys([*before, *after]):
        if name not in before or name not in after:
            lines.append(f"{name}: in one record only")
            continue
        old, new = before[name], after[name]
        keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
        if "error" in keys:
            lines.append(f"{name}: {old.get('error', 'done')} -> {new.get('error', 'done')}")
        elif keys:
            scores = [key for key in keys if key in SCORES]
            shown = [key for key in keys if key not in SCORES]
            shown += [f"{key} {old.get(key)} -> {new.get(key)}" for key in scores]
            lines.append(f"{name}: {', '.join(shown)}")
    return lines


def record(path: Path, checkout: Path) -> list[str]:
    """Write the record of a checkout. Return a line for each run that failed."""
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        runs = dict(zip(RUNS, pool.map(lambda name: record_run(checkout, name), RUNS), strict=True))
    path.write_text(json.dumps(runs, indent=1) + "\n")
    print(f"{len(runs)} runs in {time.monotonic() - started:.0f} s")
    lines = [f"{name}: {run['error']}" for name, run in runs.items() if "error" in run]
    if differences({"resumed": runs["uninterrupted"]}, {"resumed": runs["resumed"]}):
        lines.append("resumed: differs from the run without an interruption")
    return lines


def main() -> int:
    match sys.argv[1:]:
        case ["record", path]:
            lines = record(Path(path), Path(__file__).resolve().parent.parent)
        case ["record", path, checkout]:
            lines = record(Path(path), Path(checkout).resolve())
        case ["compare", first, second]:
            lines = differences(*(json.loads(Path(path).read_text()) for path in (first, second)))
        case _:
            print(__doc__)
            return 2
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
