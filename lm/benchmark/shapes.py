"""The models that are measured."""

from typing import NamedTuple

import torch

from lm.batches import Batch
from lm.config import HeadConfig, ModelConfig
from lm.model.transformer import Transformer


class Shape(NamedTuple):
    body: ModelConfig
    vocab_size: int
    batch: int
    time: int

    def model(self, device: str = "cpu") -> Transformer:
        return Transformer(self.body, HeadConfig(), vocab_size=self.vocab_size, seq_len=self.time).to(device)

    def tokens(self, device: str = "cpu") -> Batch:
        whole = torch.randint(self.vocab_size, (self.batch, self.time + 1), device=device)
        return whole[:, :-1], whole[:, 1:]


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
