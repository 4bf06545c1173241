"""Tiny models of every part, chosen so that each pair of choices occurs in one of them, and when two are the same."""

from functools import reduce
from itertools import combinations, product
from operator import or_

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from lm.config import FFNS, NORM_ORDERS, NORMS, POSITIONS, HeadConfig
from lm.model import Transformer
from tests.helpers.tiny import EVERY_HEAD, SEQ, VOCAB, tiny

AXES = {
    "kind": tuple(EVERY_HEAD),
    "ffn": FFNS,
    "position": POSITIONS,
    "norm": NORMS,
    "norm_order": NORM_ORDERS,
    "qk_norm": (False, True),
    "bias": (False, True),
    "n_kv_heads": (None, 1),
}


def pairwise(axes, apart, never):
    """Choices in which each pair of values of two axes occurs, but for the axes in `apart` and the values `never`."""

    bits = {}  # pair -> its number

    def pairs(row):
        """The pairs of a row, one bit for each."""
        chosen = combinations(zip(axes, row, strict=True), 2)
        wanted = [pair for pair in chosen if (pair[0][0], pair[1][0]) not in apart]
        return sum(1 << bits.setdefault(pair, len(bits)) for pair in wanted)

    rows = (row for row in product(*axes.values()) if not never.items() <= dict(zip(axes, row, strict=True)).items())
    candidates = {row: pairs(row) for row in rows}
    missing, chosen = reduce(or_, candidates.values()), []
    while missing:
        row = max(candidates, key=lambda row: (candidates[row] & missing).bit_count())
        missing &= ~candidates[row]
        chosen.append(dict(zip(axes, row, strict=True)))
    return chosen


MODELS = pairwise(AXES, apart={("kind", "ffn")}, never={"norm": "none", "qk_norm": True})  # a head sees no FFN


LLAMA = {"norm": "rmsnorm", "position": "rope", "ffn": "swiglu"}
GPT2 = {"norm": "layernorm", "position": "learned"}
QWEN3 = LLAMA | {"qk_norm": True}
EXPORTED = [  # architecture, head, settings, and formats that carry them
    # each architecture with every head and setting that it has, in pairs; transformers reads "gguf", not "llama.cpp"
    ("LlamaForCausalLM", "tied", LLAMA | {"n_kv_heads": 2, "vocab_rows": 310}, "transformers gguf page"),
    ("LlamaForCausalLM", "untied", LLAMA | {"rope_scaling": [8.0, 1.0, 4.0, 32.0]}, "transformers llama.cpp page"),
    ("LlamaForCausalLM", "tied_projected", LLAMA | {"bias": True, "d_head": 6}, "transformers llama.cpp"),
    ("LlamaForCausalLM", "tied_scaled", LLAMA | {"norm_eps": 1e-3, "rope_theta": 500.0}, "gguf page"),
    ("Qwen3ForCausalLM", "tied", QWEN3 | {"rope_theta": 500.0}, "gguf"),
    ("Qwen3ForCausalLM", "untied", QWEN3 | {"n_kv_heads": 2, "d_head": 16, "norm_eps": 1e-6}, "transformers gguf"),
    ("Qwen3ForCausalLM", "untied_midtraining", QWEN3 | {"attention_bias": True}, "transformers"),
    ("LlamaForCausalLM", "untied", LLAMA | {"attention_bias": "qkv", "n_kv_heads": 1}, "transformers llama.cpp page"),
    ("ArceeForCausalLM", "tied_scaled", LLAMA | {"ffn": "relu2", "n_kv_heads": 2, "bias": True}, "transformers"),
    ("ArceeForCausalLM", "untied", LLAMA | {"ffn": "gelu", "attention_bias": "qkv"}, "transformers"),
    ("ApertusForCausalLM", "untied", QWEN3 | {"ffn": "silu", "n_kv_heads": 2, "rope_theta": 100.0}, "transformers"),
    ("GPT2LMHeadModel", "tied", GPT2 | {"ffn": "gelu_tanh", "bias": True, "n_kv_heads": 2}, "transformers"),
    ("GPT2LMHeadModel", "untied_from_embedding", GPT2 | {"ffn": "relu"}, "transformers"),
    ("GPT2LMHeadModel", "tied_projected", GPT2 | {"ffn": "gelu", "attention_bias": "qkv"}, "transformers"),
]


def exported(*formats):
    """The rows of EXPORTED that one of these formats carries."""
    return [(name, head, changes) for name, head, changes, carriers in EXPORTED if {*formats} & {*carriers.split()}]


def build(kind="untied", vocab_size=VOCAB, seq_len=SEQ, seed=0, separator=None, **changes):
    """A tiny model: `kind` is a key of EVERY_HEAD or a head of its own, `changes` are those of its ModelConfig."""
    head = kind if isinstance(kind, HeadConfig) else EVERY_HEAD[kind]
    sizes = {"vocab_size": vocab_size, "seq_len": seq_len, "document_separator": separator}
    return Transformer(tiny(**changes), head, seed=seed, **sizes)


def noisy(*given, **changes):
    """A model of `build` in which nothing is zero, one or a copy, which would hide a swapped norm, bias or matrix."""
    net = build(*given, **changes).eval()
    noise = torch.Generator().manual_seed(1)
    for parameter in net.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return net


@torch.no_grad()
def assert_same_model(net, logits, bound=1e-5):
    """The logits of another program are those of `net`, relative to the largest, and differ from a changed one's."""
    tokens = random_tokens(2, min(net.seq_len, 3 * SEQ))
    expected = logits(tokens)

    def gap():
        return float((net(tokens) - expected).abs().max() / expected.abs().max())

    assert gap() <= bound
    matrix = net.get_parameter("blocks.0.attn.v_proj.weight")
    original = matrix.clone()
    matrix.mul_(1.1)
    assert gap() > 10 * bound, "the comparison sees a changed matrix"
    matrix.copy_(original)


def name_of(model):
    return "-".join(map(str, model.values()))


def random_tokens(*shape, seed=0):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


TOKENS, TARGETS = random_tokens(2, 4, SEQ)


def train_step(net, optimizer):
    """Train on TOKENS; return the loss before the step."""
    loss = F.cross_entropy(net(TOKENS).flatten(0, 1), TARGETS.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def gradients(net):
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def weights(run_dir):
    return load_file(run_dir / "model/model.safetensors")
