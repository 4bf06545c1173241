"""Previous-token-head initialisation makes heads attend 1, 2, ... tokens back, and changes nothing else."""

import pytest
import torch
from conftest import HEADS, SEQ, VOCAB, tiny
from torch import Tensor

from lm.config import BadInput, HeadConfig, ModelConfig
from lm.model.transformer import Transformer

MODEL = {"d_model": 64, "rope_theta": 30.0, "qk_norm": True, "residual_scale": 0.0}


def attention(net: Transformer, layer: int, tokens: Tensor) -> Tensor:
    """The attention weights of a layer, (B, H, T, T)."""
    seen = {}
    attn = net.blocks[layer].attn

    def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x, context = inputs
        q = context.rotate(attn.q_norm(attn.heads(attn.q_proj(x))))
        k = context.rotate(attn.k_norm(attn.heads(attn.k_proj(x))))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = (q @ k.mT) / attn.head_dim**0.5
        seen["weights"] = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1)

    handle = attn.register_forward_pre_hook(keep)
    net(tokens)
    handle.remove()
    return seen["weights"]


@pytest.mark.parametrize("n_kv_heads", [None, 1])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("head", HEADS)
def test_each_head_attends_its_own_number_of_tokens_back(head: str, norm: str, n_kv_heads: int | None) -> None:
    config = tiny(**MODEL, previous_token_init=2, norm=norm, n_kv_heads=n_kv_heads)
    tokens = torch.randint(VOCAB, (4, SEQ), generator=torch.Generator().manual_seed(0))
    net = Transformer(config, HEADS[head], vocab_size=VOCAB, seq_len=SEQ)
    with torch.no_grad():
        found = [attention(net, layer, tokens)[:, :, 8:].mean(0).argmax(-1) for layer in (0, 1)]  # (H, T)
    for layer in found:
        assert torch.equal(layer, torch.arange(8, SEQ) - torch.arange(1, 5)[:, None])


def test_only_the_embedding_and_the_affected_projections_differ() -> None:
    with_it, without = (
        Transformer(
            tiny(**MODEL, previous_token_init=layers), HEADS["untied"], vocab_size=VOCAB, seq_len=SEQ
        ).state_dict()
        for layers in (1, 0)
    )
    changed = {name for name, tensor in with_it.items() if not torch.equal(tensor, without[name])}
    assert changed == {"embed.weight", "blocks.0.attn.q_proj.weight", "blocks.0.attn.k_proj.weight"}
    assert {name: tensor.shape for name, tensor in with_it.items()} == {n: t.shape for n, t in without.items()}
    shift = with_it["embed.weight"] - without["embed.weight"]
    torch.testing.assert_close(shift, shift[:1].expand_as(shift))  # the same for all tokens


def test_the_global_random_state_is_unchanged() -> None:
    state = torch.get_rng_state()
    Transformer(tiny(**MODEL, previous_token_init=1), HEADS["tied"], vocab_size=VOCAB, seq_len=SEQ)
    assert torch.equal(torch.get_rng_state(), state)


def test_another_seed_has_another_direction() -> None:
    def direction(seed: int, layers: int) -> Tensor:
        return Transformer(
            tiny(**MODEL, previous_token_init=layers),
            HeadConfig(),
            vocab_size=VOCAB,
            seq_len=SEQ,
            seed=seed,
        ).embed.weight[0]

    one, two = (direction(seed, 1) - direction(seed, 0) for seed in (0, 1))
    assert torch.cosine_similarity(one, two, dim=0).abs() < 0.6
    assert one.norm().item() == pytest.approx(two.norm().item())


def test_it_is_refused_without_rope_and_below_zero() -> None:
    with pytest.raises(BadInput, match=r"model\.position=learned: .*=1 needs rope; add model\.previous_token_init=0"):
        ModelConfig(previous_token_init=1, position="learned")
    with pytest.raises(BadInput, match=r"model\.previous_token_init=-1"):
        ModelConfig(previous_token_init=-1)


def test_a_custom_linear_class_needs_a_weight() -> None:
    def build(linear: str) -> Transformer:
        return Transformer(
            tiny(**MODEL, previous_token_init=1, linear=linear), HEADS["tied"], vocab_size=VOCAB, seq_len=SEQ
        )

    assert torch.equal(*(build(name).blocks[0].attn.q_proj.weight for name in ("linear", "torch.nn.Linear")))
    with pytest.raises(BadInput, match=r"model\.linear: its class has no `weight`; add model\.previous_token_init=0"):
        build("test_previous_token.Factored")


class Factored(torch.nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(in_features, 4), torch.nn.Linear(4, out_features)

    def reset_parameters(self) -> None:
        self.first.reset_parameters()
        self.second.reset_parameters()
