"""The overhead of Lightning's Trainer and of logging, over a bare loop of the same steps."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path

from lm.ablation.step_timing import train_step
from lm.benchmark.measure import Measurement, alternate
from lm.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    TokenizerConfig,
    TrainerConfig,
    ValidationConfig,
)
from lm.data.batches import TrainingStream
from lm.data.tokens import prepare
from lm.model.transformer import Transformer
from lm.training.loss import plain
from lm.training.optim import build_optimizer
from lm.training.train import train

SHORT, LONG = 5, 505  # steps
LIMIT = 0.03 * 40  # ms: 3 % of a step of 40 ms


def trainer(device: str, seconds: float) -> Iterator[Measurement]:
    """Runs of two lengths are compared, so start and end drop out. The model is very small, so that the overhead can be
    measured: the step time of a real model varies by more than the overhead."""
    with tempfile.TemporaryDirectory() as folder:
        run = very_small(folder, device)
        data, number = prepare(run.data, run.tokenizer), count()
        net = Transformer(run.model, run.head, vocab_size=data.tokenizer.vocab_size, seq_len=run.data.seq_len)
        optimizer = build_optimizer(net.to(device), run.optim, run.head)
        stream = iter(TrainingStream(data.train, seq_len=run.data.seq_len, batch_size=run.data.batch_size, seed=0))

        def in_trainer(steps: int) -> None:
            options = replace(run.trainer, max_steps=steps)
            train(replace(run, trainer=options, run_dir=f"{folder}/run{next(number)}"), data)

        def bare_loop() -> None:
            for tokens, targets in islice(stream, LONG - SHORT):
                train_step(partial(plain, net), optimizer, [(tokens.to(device), targets.to(device))])

        calls = {"long": lambda: in_trainer(LONG), "short": lambda: in_trainer(SHORT), "bare": bare_loop}
        times = alternate(calls, seconds)
    long, short, bare = (min(times[name]) for name in calls)  # other load on the machine can only add to a time
    overhead = 1000 * (long - short - bare) / (LONG - SHORT)
    yield Measurement("trainer", "overhead per step", overhead, "ms", "3 % of 40 ms", LIMIT)


def very_small(folder: str, device: str) -> RunConfig:
    """A run whose steps take little more than the Trainer itself; its text is written into `folder`."""
    path = Path(folder) / "text.txt"
    path.write_text("".join(f"line {i}: {i * i} is the square of it\n" for i in range(400)))
    return RunConfig(
        data=DataConfig(source="text", path=str(path), batch_size=1, seq_len=16, cache_dir=f"{folder}/cache"),
        model=ModelConfig(d_model=16, n_heads=1, d_ff=16),
        tokenizer=TokenizerConfig(kind="byte", vocab_size=None),
        trainer=TrainerConfig(accelerator=device, precision="32-true", enable_progress_bar=False),
        checkpoint=CheckpointConfig(every=10**6),
        validation=ValidationConfig(every=0, batches=1),
        prompts=[],
        threads=1,
    )
