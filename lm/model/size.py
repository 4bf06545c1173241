"""What a model costs: parameters by role, and FLOPs per token."""

from collections import Counter

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lm.config import user_classes
from lm.model.linear import is_adapter
from lm.model.transformer import Transformer

ROLES = {"embed": "embedding", "position": "position", "head": "head", "norm": "norm"}  # all others are in the blocks
BLOCK_NORMS = {"attn_norm", "ffn_norm", "q_norm", "k_norm"}  # a user's class may have parts of any name


def role(name: str) -> str:
    """Return the role of a parameter by its name: embedding, position, attention, ffn, norm, head or adapter."""
    if is_adapter(name):
        return "adapter"
    first, *rest = name.split(".")  # of blocks.0.attn.q_proj.weight the rest is 0, attn, q_proj, weight
    if first in ROLES:
        return ROLES[first]
    if BLOCK_NORMS & {*rest[:-1]}:
        return "norm"
    return {"attn": "attention"}.get(rest[1], rest[1])


def n_params_by_role(net: nn.Module) -> dict[str, int]:
    """Return the number of parameters of each role. Each tensor counts once."""
    counts: Counter[str] = Counter()
    for name, parameter in net.named_parameters():
        counts[role(name)] += parameter.numel()
    return dict(counts)


def n_params(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def n_params_trained(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)


def flops_per_token(net: Transformer) -> int:
    """Return the floating-point operations of the forward and backward pass per token of a full window.

    The operations of the optimizer do not count. torch counts on a model of the same configuration, so the count covers
    any variant and any linear class. This model is on the meta device and holds no values, or on the CPU if a class of
    the user looks at values. Attention counts in full, as if no position were masked.
    """
    device = "cpu" if user_classes(net.config) else "meta"  # a class of the user may look at values
    with torch.device(device):
        twin = Transformer(net.config, net.head_config, vocab_size=net.vocab_size, seq_len=net.seq_len)
        twin.eval()  # attention with dropout leaves out what is masked
        tokens = torch.zeros(1, net.seq_len, dtype=torch.long)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            twin(tokens).sum().backward()
    return counter.get_total_flops() // net.seq_len
