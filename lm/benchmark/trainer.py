"""What Lightning's Trainer, the log and the bar add to a bare loop over the same steps."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import nn

from lm.batches import TrainingStream
from lm.benchmark.measure import Figure, alternate, paired
from lm.config import CheckpointConfig, DataConfig, RunConfig, TokenizerConfig, ValidationConfig
from lm.data import prepare
from lm.model.transformer import Transformer
from lm.optim import build_optimizer
from lm.train import train

STEPS = 30


def trainer(device: str, seconds: float) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_text("".join(f"line {i}: {i * i} is the square of it\n" for i in range(4000)))
        run = RunConfig(
            data=DataConfig(source="text", path=str(path), batch_size=4, cache_dir=str(Path(folder) / "cache")),
            tokenizer=TokenizerConfig(kind="byte", vocab_size=None),
            trainer={"accelerator": "gpu" if device == "cuda" else device, "log_every_n_steps": 10},
            checkpoint=CheckpointConfig(every=10**6),
            validation=ValidationConfig(every=0, batches=1),
            prompts=[],
        )
        yield from overhead(run, Path(folder), seconds, device)


def overhead(run: RunConfig, folder: Path, seconds: float, device: str) -> Iterator[Figure]:
    """Two lengths of run, whose difference is steps alone: start and end drop out."""
    data, count = prepare(run.data, run.tokenizer), iter(range(10**6))

    def by_trainer(steps: int) -> Callable[[], Any]:
        options = {**run.trainer, "max_steps": steps, "gradient_clip_val": 1.0, "precision": "32-true"}
        return lambda: train(replace(run, trainer=options, run_dir=str(folder / f"run{next(count)}")), data)

    net = Transformer(run.model, run.head, vocab_size=data.tokenizer.vocab_size, seq_len=run.data.seq_len).to(device)
    optimizer = build_optimizer(net, run.optim, run.head)
    batches = iter(TrainingStream(data.train, seq_len=run.data.seq_len, batch_size=run.data.batch_size, seed=0))

    def by_hand() -> None:
        for tokens, targets in islice(batches, STEPS):
            F.cross_entropy(net(tokens.to(device)).flatten(0, 1), targets.to(device).flatten()).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    times = alternate({"long": by_trainer(STEPS + 5), "short": by_trainer(5), "bare": by_hand}, seconds, at_least=5)
    times["trainer"] = [long - short for long, short in zip(times["long"], times["short"], strict=True)]
    with_it, without = paired(times, "trainer", "bare")
    yield Figure("trainer", "step in the Trainer", 1000 * with_it / STEPS, "ms", "bare loop", 1000 * without / STEPS)
