"""The default run in plain PyTorch, without Lightning and Hydra: the loop to read on a first evening.

    python docs/plain_loop.py my.txt

On a CPU it makes the losses and weights of this command, bit for bit (tests/test_train.py):

    python scripts/train.py my.txt experiment=none trainer=cpu trainer.precision=32-true threads=1 loss=plain

Without experiment=none, a text of up to 2 MB gets a recipe of its size instead (docs/own-text.md).

The laboratory gives the model, the tokens, the batches and Muon. Loop, schedule, clipping and score are here. The real
loop in lm/training/train.py also has devices, bf16, logs, checkpoints, a resume and the best model.
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.config import DataConfig, HeadConfig, ModelConfig, TokenizerConfig
from lm.data.batches import TrainingStream
from lm.data.tokens import TextData, prepare
from lm.model.transformer import Transformer
from lm.training.optim import Muon

STEPS, BATCH_SIZE, SEQ_LEN, VOCAB_SIZE = 1600, 8, 128, 2048
MATRIX_LR, ADAM_LR, EMBEDDING_LR = 0.015, 3e-3, 8.5 * 3e-3  # at the first step; they fall to 0 in a straight line
WEIGHT_DECAY, MAX_NORM, SEED = 0.1, 1.0, 0


def build_model(vocab_size: int) -> Transformer:
    """Return the model of configs/model/small.yaml with the head of configs/head/tied.yaml."""
    model = ModelConfig(
        n_layers=4, d_model=128, n_heads=2, d_ff=320, qk_norm=True, rope_theta=100, previous_token_init=2
    )
    return Transformer(model, HeadConfig(), vocab_size=vocab_size, seq_len=SEQ_LEN, seed=SEED)


def build_optimizer(net: Transformer) -> Muon:
    """Return Muon for the matrices of the blocks, with AdamW for the tied embedding, the norms and all else."""
    blocks = [*net.blocks.parameters()]
    matrices = [parameter for parameter in blocks if parameter.ndim == 2]
    vectors = [parameter for parameter in (*blocks, *net.norm.parameters()) if parameter.ndim < 2]
    muon = {"lr": MATRIX_LR, "weight_decay": WEIGHT_DECAY, "momentum": 0.9, "ns_steps": 4}
    groups = [
        {"params": matrices, **muon},
        {"params": vectors, "lr": ADAM_LR},
        {"params": [net.embed.weight], "lr": EMBEDDING_LR},
    ]
    return Muon(groups, betas=(0.8, 0.95), weight_decay=0.0, fused=True)


def loss_of(net: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = net(tokens)  # (B, T, V): raw, because cross_entropy contains the softmax
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(data: TextData, steps: int = STEPS) -> tuple[Transformer, list[float]]:
    """Train a model. Return the model, and the loss of each step in nats per token."""
    net = build_model(data.tokenizer.vocab_size)
    optimizer = build_optimizer(net)
    peaks = [group["lr"] for group in optimizer.param_groups]
    stream = TrainingStream(data.train, seq_len=SEQ_LEN, batch_size=BATCH_SIZE, seed=SEED)
    losses = []
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * (1 - step / steps)
        tokens, targets = stream.batch(step)  # (B, T) each; targets are the next tokens
        loss = loss_of(net, tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {losses[-1]:.3f}")
    return net, losses


@torch.no_grad()
def score(net: Transformer, tokens: Tensor) -> float:
    """Return the loss of a text of tokens (n,), in nats per token. Each token except the first is a target once."""
    nats = 0.0
    for start in range(0, len(tokens) - 1, SEQ_LEN):
        window = tokens[None, start : start + SEQ_LEN + 1]
        nats += loss_of(net, window[:, :-1], window[:, 1:]).item() * (window.shape[1] - 1)
    return nats / (len(tokens) - 1)


@torch.no_grad()
def generate(net: Transformer, tokens: list[int], n: int) -> list[int]:
    """Return the tokens and n further tokens, greedily.

    The largest logit has the largest probability, so greedy decoding needs no softmax.
    """
    for _ in range(n):
        logits = net(torch.tensor([tokens[-SEQ_LEN:]]))  # (1, T, V)
        tokens = [*tokens, int(logits[0, -1].argmax())]
    return tokens


if __name__ == "__main__":
    torch.set_num_threads(1)
    data = prepare(DataConfig(source="text", path=sys.argv[1]), TokenizerConfig(kind="bpe", vocab_size=VOCAB_SIZE))
    net, _ = train(data, *map(int, sys.argv[2:]))
    val = torch.from_numpy(data.val.astype("int64"))
    loss = score(net, val)
    print(f"validation loss {loss:.4f}, {loss * (len(val) - 1) / math.log(2) / data.val_bytes:.3f} bits per byte")
    print(data.tokenizer.decode(generate(net, val[:16].tolist(), 48)))
