"""Greedy decoding by its definition, and a model whose output shows any mistake of it."""

from dataclasses import replace
from functools import cache
from itertools import islice

import torch

from lm.decoding import decode, window_start
from tests.helpers.models import build
from tests.helpers.tiny import SEQ, UNTIED, VOCAB

_SENSITIVE = replace(UNTIED, embedding_std=0.3, head_std=1.0)  # large weights: an untrained model with varied output


@cache
def sensitive(vocab_size=VOCAB, seq_len=SEQ, **changes):
    """An untrained model whose next token depends on its whole context: large residual branches, peaked attention."""
    net = build(_SENSITIVE, vocab_size, seq_len, residual_scale=1.5, **changes).eval()
    for block in net.blocks:
        block.attn.q_proj.weight.data.mul_(8)
    return net


def tokens(net, prompts, n, *sampling, **options):
    """n new tokens for each prompt."""
    return [list(row) for row in zip(*islice(decode(net, prompts, *sampling, **options), n), strict=True)]


@torch.no_grad()
def by_definition(net, prompt, n):
    """Greedy decoding in its simplest form: the window, the whole model, the argmax of the last logits."""
    text = list(prompt)
    for _ in range(n):
        window = text[window_start(len(text), net.seq_len) :]
        text.append(net(torch.tensor([window]))[0, -1].argmax().item())
    return text[len(prompt) :]
