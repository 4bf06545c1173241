"""Folders of transformers at the size of published models: are they read exactly, and in how much memory and time?

The weights are random and the tokenizer has 257 tokens: neither changes what is measured. Each step runs in a process
of its own, because the peak memory of a process never falls. The largest model takes 10 GB of disk space.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm.benchmark.measure import Measurement
from lm.benchmark.memory import resident
from lm.data.vocabulary import byte_tokenizer
from lm.exchange.huggingface import export
from lm.exchange.portable import load_model

IDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
)


def sized(model_type: str, *sizes: float, **rope: Any) -> dict[str, Any]:
    """The values of KEYS, and what is said of RoPE."""
    found = {"model_type": model_type, "tie_word_embeddings": True, **dict(zip(KEYS, sizes, strict=True))}
    return found | {"rope_parameters": {"rope_type": "default", **rope}}


SCALED = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SIZES: dict[str, dict[str, Any]] = {  # what transformers does not take by default
    "GPT-2": {"model_type": "gpt2"},
    "SmolLM2-135M": sized("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, rope_theta=1e5),
    "Qwen3-0.6B": sized("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, rope_theta=1e6),
    "Llama-3.2-1B": sized(
        "llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, rope_type="llama3", rope_theta=5e5, **SCALED
    ),
}


def imported(device: str, seconds: float) -> Iterator[Measurement]:
    """Nothing where transformers is not installed."""
    for name, settings in SIZES.items() if find_spec("transformers") else ():
        yield from measure(name, settings)


def measure(name: str, settings: dict[str, Any]) -> Iterator[Measurement]:
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool,  # a process each
    ):
        size = pool.apply(write, (settings, folder))
        peak, seconds, difference, changed = pool.apply(load, (folder,))
    yield Measurement("import", f"logits, {name}", difference, "of the largest", "limit", 1e-5)
    yield Measurement("import", f"import and export, {name}", changed, "changed tensors")
    yield Measurement("import", f"peak memory, {name}", peak / 1e6, "MB", "weights", size / 1e6)
    yield Measurement("import", f"time to load, {name}", seconds, "s")


def write(settings: dict[str, Any], folder: str) -> int:
    """Write a model and its logits; returns the bytes of its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(**settings, **IDS)
    theirs: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in theirs.parameters():  # initial zeros and ones would hide a swapped norm or bias
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    theirs.save_pretrained(folder)
    Path(folder, "tokenizer.json").write_text(byte_tokenizer().to_json())
    with torch.no_grad():
        logits = theirs.eval()(tokens(config.vocab_size)).logits
    save_file({"logits": logits}, Path(folder, "logits.safetensors"))
    return sum(parameter.nbytes for parameter in theirs.parameters())


def load(folder: str) -> tuple[int, float, float, int]:
    """Peak bytes and seconds of loading, the largest difference of the logits as a fraction of the largest logit, and
    the number of tensors that an export changes, leaves out or adds.
    """
    torch.arange(1, device="meta")  # what torch imports for a first tensor without values is not counted
    before, started = resident(), time.perf_counter()
    net, tokenizer = load_model(folder)
    peak, seconds = resident() - before, time.perf_counter() - started
    expected = load_file(Path(folder, "logits.safetensors"))["logits"]
    with torch.no_grad():
        difference = (net(tokens(net.vocab_size)) - expected).abs().max() / expected.abs().max()
    out = Path(folder, "out")
    export(net, tokenizer, out)
    return peak, seconds, float(difference), changes(Path(folder, "model.safetensors"), out / "model.safetensors")


def tokens(vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (1, 128), generator=torch.Generator().manual_seed(0))


def changes(before: Path, after: Path) -> int:
    with safe_open(before, "pt") as one, safe_open(after, "pt") as other:
        here, there = {*one.keys()}, {*other.keys()}
        changed = [name for name in here & there if not torch.equal(one.get_tensor(name), other.get_tensor(name))]
    return len(here ^ there) + len(changed)
