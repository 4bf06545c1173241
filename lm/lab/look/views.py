"""What the page shows, as pure functions: loaded models and a question in, dicts for JSON out."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.data.batches import IGNORED
from lm.data.tokenizer import Tokenizer
from lm.decoding import Sampling, decode, window_start
from lm.errors import UserError, require
from lm.lab.look.runs import LoadedModel, token_texts
from lm.lab.measures.samples import validation_prompts
from lm.model.transformer import Attention, Transformer
from lm.scoring import evaluate
from lm.training.run_directory import GIVE

MAX_NEW_TOKENS = 512
MAX_TEXT_TOKENS = 4096  # of a pasted text
PASSAGE = 1024  # tokens of the validation text that are shown at a time
CANDIDATES = 5
BEFORE = 8  # tokens before a passage, which may hold the beginning of its first character


# --- the prompt


def continuations(
    models: Sequence[LoadedModel],
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each new token of the models in turn: its text, its rank, its lead, the likeliest tokens.

    `rank` is 1 for the largest logit. `lead` is the token's logit minus the best logit of all others, below 0 if the
    token was drawn although another token is likelier. Both are read off the raw logits: there is no softmax. Raises
    UserError.
    """
    require(0 < max_new_tokens <= MAX_NEW_TOKENS, f"max_new_tokens={max_new_tokens}", f"1 to {MAX_NEW_TOKENS}")
    streams = {}
    for i, model in enumerate(models):
        kept = model.tokenizer.without_unknown(prompt)
        if unknown := "".join(dict.fromkeys(c for c in prompt if c not in kept)):
            yield {"model": i, "note": f"The model does not know {unknown!r}: the prompt is continued without them."}
        streams[i] = _continuation(model, kept, max_new_tokens, sampling)
    while streams:
        for i in [*streams]:
            if (row := next(streams[i], None)) is None:
                del streams[i]
            else:
                yield {"model": i, **row}


def _continuation(model: LoadedModel, text: str, max_new_tokens: int, sampling: Sampling) -> Iterator[dict[str, Any]]:
    tokenizer, logits = model.tokenizer, deque[Tensor]()  # of the tokens whose characters are incomplete
    prompt = [tokenizer.begin, *tokenizer.encode(text)]
    steps = decode(model.net, [prompt], sampling, observe=lambda row: logits.append(row[0].float()))

    def ids() -> Iterator[int]:
        for (token,) in islice(steps, max_new_tokens):
            yield token
            if token in tokenizer.stops:
                return

    for token, text in token_texts(tokenizer, ids(), after=prompt):
        row = logits.popleft()  # (V,)
        values, best = row.topk(min(CANDIDATES, len(row)))
        own, first, second = float(row[token]), *values[:2].tolist()
        shown = [*best.tolist(), *([] if token in best else [token])]
        shares = (row[shown] - row.logsumexp(-1)).exp()
        scaled = sampling.restrict(row) / sampling.temperature if sampling.temperature else row
        drawn = (scaled[shown] - scaled.logsumexp(-1)).exp()
        yield {
            "token": token,
            "text": text,
            "label": tokenizer.label(token),
            "rank": int((row > own).sum()) + 1,
            "lead": own - (second if own == first else first),
            "candidates": [
                {
                    "token": i,
                    "text": tokenizer.decode([i], after=[i]),
                    "label": tokenizer.label(i),
                    "share": share,
                    "drawn": after,
                }
                for i, share, after in zip(shown, shares.tolist(), drawn.tolist(), strict=True)
            ],
        }


# --- the loss of each token


class _LossByToken:
    """A measure of lm.scoring: the negative log-likelihood of each target in nats, in order."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def add(self, logits: Tensor, targets: Tensor) -> None:
        nll = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        self.losses += nll[targets != IGNORED].tolist()


def token_losses(model: LoadedModel, ids: Sequence[int]) -> np.ndarray:
    """Return the loss in nats of each token but the first, in the windows of `evaluate`. Raises UserError."""
    measure = _LossByToken()
    evaluate(model.net, np.array(ids), model.net.seq_len, measures=[measure])
    require(len(measure.losses) == len(ids) - 1, f"run={model.name}", "a model whose losses are numbers")
    return np.array(measure.losses)


def scored_text(models: Sequence[LoadedModel], text: str, passage: int = 0) -> dict[str, Any]:
    """Return the tokens of a text with the losses of one or two models.

    An empty text is a passage of a validation text, of the first model that has one, in the windows of `evaluate`. The
    token that only begins a text is left out. Raises UserError for models of different tokenizers, whose tokens have no
    difference.
    """
    first, n_passages = models[0], 0
    is_same = len({model.tokenizer.hash for model in models}) == 1  # else token ids mean something else in each
    require(is_same, f"run={models[-1].name}", f"a model with the tokenizer of {first.name}")
    if text:
        ids = [first.tokenizer.begin, *first.tokenizer.encode(text)]  # refuses half of a character
        n_bytes = len(text.encode())
        require(len(ids) <= MAX_TEXT_TOKENS, f"text of {len(ids) - 1:,} tokens", f"fewer than {MAX_TEXT_TOKENS:,}")
    else:
        validation, length = _validation_text(models), first.net.seq_len * max(1, PASSAGE // first.net.seq_len)
        n_passages = -(-(len(validation) - 1) // length)
        require(0 <= passage < n_passages, f"passage={passage + 1}", f"1 to {n_passages:,}")
        begin = passage * length + 1
        ids = validation[begin - 1 : begin + length].tolist()
        before = validation[max(begin - BEFORE, 0) : begin].tolist()
        n_bytes = _bytes_of(first.tokenizer, before + ids[1:]) - _bytes_of(first.tokenizer, before)
    pieces = [piece for _, piece in token_texts(first.tokenizer, ids[1:], after=ids[:1])]
    losses = [token_losses(model, ids) for model in models]
    return {
        "n_passages": n_passages,
        "n_bytes": n_bytes,
        "tokens": [
            {
                "text": piece,
                "label": first.tokenizer.label(token),
                "losses": [float(values[i]) for values in losses],
            }
            for i, (token, piece) in enumerate(zip(ids[1:], pieces, strict=True))
            if token != first.tokenizer.unscored
        ],
    }


def _validation_text(models: Sequence[LoadedModel]) -> np.ndarray:
    """Return the tokens of the validation text of the first model that has one, (n,). Raises UserError."""
    errors = list[UserError]()
    for model in models:
        try:
            return model.text.val
        except UserError as error:  # a folder of transformers has no text
            errors.append(error)
    raise UserError(str(errors[0]).replace(GIVE, "paste a text"))


def _bytes_of(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Return the bytes of the text of some tokens, without a character that they only begin."""
    return len(tokenizer.decode(ids).rstrip("\ufffd").encode())


# --- attention


@torch.no_grad()
def attention_weights(net: Transformer, ids: Sequence[int], position: int) -> Tensor:
    """Return the attention weights of each head at a position, (L, H, S), computed from q and k as the model does."""
    rows: list[Tensor] = []

    def observe(attention: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        x, context = inputs
        assert isinstance(attention, Attention)
        q = context.rotate(attention.q_norm(attention.heads(attention.q_proj(x))))  # (1, H, T, K)
        k = context.rotate(attention.k_norm(attention.heads(attention.k_proj(x))))  # (1, n_kv_heads, T, K)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)[..., : position + 1, :]  # (1, H, S, K)
        scores = (k @ q[..., position, :, None])[..., 0].float() / math.sqrt(attention.head_dim)  # (1, H, S)
        if context.mask is not None:
            scores = scores + context.mask[..., position, : position + 1]
        rows.append(scores[0].softmax(-1))

    layers = [module for module in net.modules() if isinstance(module, Attention)]
    handles = [layer.register_forward_pre_hook(observe) for layer in layers]
    try:
        net.hidden_states(torch.tensor([ids], device=net.embed.weight.device))
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(rows)


def attention(model: LoadedModel, text: str, position: int | None = None) -> dict[str, Any]:
    """Return the tokens of a text and the attention weights at a position.

    Of a text that is longer than the context, take the tokens that decoding would see.
    """
    tokenizer = model.tokenizer
    ids = [tokenizer.begin, *tokenizer.encode(text)]
    ids = ids[window_start(len(ids), model.net.seq_len) :]
    position = len(ids) - 1 if position is None else position
    require(0 <= position < len(ids), f"position={position}", f"0 to {len(ids) - 1}")
    weights = attention_weights(model.net, ids, position)
    require(bool(weights.isfinite().all()), f"run={model.name}", "a model whose attention weights are numbers")
    pieces = [piece for _, piece in token_texts(tokenizer, ids)]
    pieces[0] = pieces[0] or tokenizer.label(ids[0])  # of the token that begins each text
    return {
        "name": model.name,
        "position": position,
        "tokens": [{"text": text, "label": tokenizer.label(i)} for text, i in zip(pieces, ids, strict=True)],
        "weights": [[[round(share, 5) for share in head] for head in layer] for layer in weights.tolist()],
    }


# --- what the page opens with


def opening(model: LoadedModel) -> dict[str, str]:
    """Return a line of the run's validation text to continue, and the beginning of that text."""
    ids, prompt = [model.tokenizer.begin], ""
    with suppress(UserError, OSError):
        ids = model.text.val[:2000].tolist()
        prompt = next(iter(validation_prompts(model.text)), model.tokenizer.decode(ids[:32]).strip())
    return {"prompt": prompt, "text": model.tokenizer.decode(ids[:48])}
