"""The model shapes that are measured, and a training step of each."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from lm.ablation.step_timing import train_step
from lm.config import HeadConfig, ModelConfig, OptimConfig, RunConfig, TrainerConfig
from lm.data.batches import Batch
from lm.model.transformer import Transformer, enable_activation_checkpointing
from lm.training.loss import build_loss, resolve_loss
from lm.training.optim import build_optimizer


class Shape(NamedTuple):
    model: ModelConfig
    vocab_size: int
    batch: int
    time: int

    def build(self, device: str = "cpu", document_mask: bool = False) -> Transformer:
        separator = 0 if document_mask else None
        return Transformer(
            self.model, HeadConfig(), vocab_size=self.vocab_size, seq_len=self.time, document_separator=separator
        ).to(device)

    def tokens(self, device: str = "cpu") -> Batch:
        whole = torch.randint(self.vocab_size, (self.batch, self.time + 1), device=device)
        return whole[:, :-1], whole[:, 1:]

    def run(self, device: str, loss: str = "auto", compiled: bool = False, mixed: bool = False) -> RunConfig:
        """What decides the loss function, which it names."""
        trainer = TrainerConfig(accelerator=device, precision="bf16-mixed" if mixed else "32-true")
        run = RunConfig(loss=loss, compile=compiled, trainer=trainer)
        return replace(run, loss=resolve_loss(run, self.vocab_size))

    def step(
        self,
        device: str,
        loss: str = "auto",
        checkpointing: bool = False,
        compiled: bool = False,
        mixed: bool = False,
        document_mask: bool = False,
    ) -> partial[None]:
        """A callable that makes one training step with AdamW.

        `checkpointing`: with activation checkpointing; `mixed`: in bf16.
        """
        if compiled:
            torch.compiler.reset()  # otherwise torch would compile a second shape with dynamic shapes
        net = self.build(device, document_mask)
        if checkpointing:
            enable_activation_checkpointing(net)
        run = self.run(device, loss, compiled, mixed)
        score = partial(build_loss(run), net)
        optimizer = build_optimizer(net, OptimConfig(), HeadConfig())
        return partial(train_step, score, optimizer, [self.tokens(device)], mixed)


DEFAULT = Shape(ModelConfig(), 2048, 8, 128)
SHAKESPEARE = Shape(ModelConfig(n_heads=4, d_ff=344), 65, 12, 64)
GPT2 = Shape(
    ModelConfig(
        n_layers=12, d_model=768, n_heads=12, d_ff=3072, ffn="gelu", norm="layernorm", position="learned", bias=True
    ),
    50304,
    16,
    1024,
)
