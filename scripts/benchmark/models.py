"""The models that are measured, with a training step of each: of lm, of transformers, and of a clone of nanoGPT."""

import importlib.util
import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lm.config import HeadConfig, ModelConfig, OptimConfig, RunConfig, TrainerConfig
from lm.data.tokenizer import byte_tokenizer
from lm.errors import UserError
from lm.lab.formats.huggingface import export
from lm.model.transformer import Transformer, enable_activation_checkpointing
from lm.system.device import fast_attention
from lm.training.loss import LossOf, resolve_loss
from lm.training.optim import build_optimizer

Batch = tuple[Tensor, Tensor]  # token ids (B, T), targets (B, T)
Loss = Callable[[Tensor, Tensor], Tensor]  # of a batch, a scalar
NanoGPT = tuple[Any, Any]  # its classes GPT and GPTConfig


class Shape(NamedTuple):
    model: ModelConfig
    vocab_size: int
    batch_size: int
    seq_len: int

    def build(self, device: str) -> Transformer:
        return Transformer(self.model, HeadConfig(), vocab_size=self.vocab_size, seq_len=self.seq_len).to(device)

    def batch(self, device: str) -> Batch:
        tokens = torch.randint(self.vocab_size, (self.batch_size, self.seq_len + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


DEFAULT = Shape(ModelConfig(), 2048, 8, 128)
_GPT2 = ModelConfig(ffn="gelu", norm="layernorm", position="learned", bias=True)
GPT2 = Shape(replace(_GPT2, n_layers=12, d_model=768, n_heads=12, d_ff=3072), 50304, 32, 1024)
NANOGPT = [  # its recipes for a CPU and for a GPU
    Shape(replace(_GPT2, n_layers=4, d_model=128, n_heads=4, d_ff=512), 65, 12, 64),
    Shape(replace(_GPT2, n_layers=6, d_model=384, n_heads=6, d_ff=1536), 65, 64, 256),
]


def train_step(loss: Loss, optimizer: Optimizer, batch: Batch, mixed: bool) -> None:
    """Forward, backward, clip at 1, update; `mixed`: in bf16."""
    tokens, targets = batch
    device = tokens.device.type
    with torch.autocast(device, torch.bfloat16, enabled=mixed), fast_attention(device, mixed, tokens.shape[1]):
        value = loss(tokens, targets)
    value.backward()
    torch.nn.utils.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def step(
    shape: Shape,
    device: str,
    mixed: bool = False,
    compiled: bool = False,
    *,
    loss: str = "auto",
    checkpointing: bool = False,
) -> partial[None]:
    """A callable that makes one training step of lm with AdamW."""
    if compiled:
        torch.compiler.reset()  # otherwise torch would compile a second shape with dynamic shapes
    net = shape.build(device)
    if checkpointing:
        enable_activation_checkpointing(net)
    trainer = TrainerConfig(accelerator=device, precision="bf16-mixed" if mixed else "32-true")
    run = RunConfig(loss=loss, compile=compiled, trainer=trainer)
    run = replace(run, loss=resolve_loss(run, shape.vocab_size))
    optimizer = build_optimizer(net, OptimConfig(), HeadConfig())
    return partial(train_step, LossOf(net, run), optimizer, shape.batch(device), mixed)


def in_transformers(net: Transformer) -> Any | None:
    """The same weights as AutoModelForCausalLM loads them; None where transformers is missing or has no such model."""
    if find_spec("transformers") is None:
        return None
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        try:
            export(net, byte_tokenizer(), Path(folder) / "out")
        except UserError:
            return None
        return AutoModelForCausalLM.from_pretrained(Path(folder) / "out").to(net.embed.weight.device)


def step_in_transformers(shape: Shape, device: str, mixed: bool, compiled: bool) -> partial[None] | None:
    """A callable that makes one training step of the same model with AdamW."""
    if (model := in_transformers(shape.build(device))) is None:
        return None
    optimizer = AdamW(model.train().parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
    call = torch.compile(model) if compiled else model

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(call(tokens).logits.flatten(0, 1), targets.flatten())

    return partial(train_step, loss, optimizer, shape.batch(device), mixed)


def read_nanogpt(clone: str) -> NanoGPT:
    """The model classes of a clone. Raises UserError if the folder is no clone of nanoGPT."""
    path = Path(clone) / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return module.GPT, module.GPTConfig
    except Exception as error:  # whatever another file of that name does
        raise UserError(f"nanogpt={clone}: expected a clone of nanoGPT ({type(error).__name__}: {error})") from error


def step_in_nanogpt(nanogpt: NanoGPT, shape: Shape, device: str, mixed: bool, compiled: bool) -> partial[None]:
    """A callable that makes the training step of nanoGPT's train.py, with its optimizer."""
    (gpt, config), model = nanogpt, shape.model
    sizes = {"n_layer": model.n_layers, "n_embd": model.d_model, "n_head": model.n_heads, "bias": model.bias}
    with redirect_stdout(io.StringIO()):  # it prints its number of parameters
        net = gpt(config(block_size=shape.seq_len, vocab_size=shape.vocab_size, **sizes)).to(device)
        optimizer = net.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device)
    call = torch.compile(net) if compiled else net
    return partial(train_step, lambda tokens, targets: call(tokens, targets)[1], optimizer, shape.batch(device), mixed)
