"""What the page shows, as pure functions: loaded models and a question in, dicts for JSON out."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.config import UserError, require
from lm.data.batches import IGNORED
from lm.data.tokenizer import Tokenizer
from lm.formats.base import model_folder
from lm.formats.folder import load_model
from lm.inference.decode import decode
from lm.inference.details import frequency_bands, token_counts
from lm.inference.evaluate import evaluate
from lm.inference.sampling import Sampling
from lm.inference.text import own_validation
from lm.model.transformer import Transformer
from lm.runs.curves import curve, read_curves
from lm.runs.find import read_run
from lm.system.device import best_device

MAX_NEW_TOKENS = 512
MAX_TEXT_TOKENS = 4096  # of a pasted text
PASSAGE = 1024  # tokens of the validation text that are shown at a time
CANDIDATES = 5
NEIGHBOURS = 10
MAX_POINTS = 400  # of a curve, and of a cloud


@dataclass(eq=False)
class LoadedModel:
    name: str
    path: Path  # of the run
    net: Transformer
    tokenizer: Tokenizer
    trust: bool = False  # allows downloading the run's text

    @cached_property
    def own_text(self) -> tuple[np.ndarray, np.ndarray]:
        """The run's validation tokens, and how often each token id occurs in its training text. Raises UserError."""
        validation, _, train = own_validation(self.path, self.trust)
        return validation, token_counts(train, self.net.vocab_size)

    @property
    def counts(self) -> np.ndarray | None:
        """How often each token id occurs in the training text (V,); None if that text is not at hand."""
        try:
            return self.own_text[1]
        except (UserError, OSError):
            return None


def load(name: str, path: Path, trust: bool = False) -> LoadedModel:
    """Raises UserError."""
    net, tokenizer = load_model(path, trust)
    return LoadedModel(name, path, net.to(best_device()), tokenizer, trust)


# --- tokens as text


def token_texts(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Each id with the text that it completes: "" for all but the last token of a character. Joined, it is the text."""
    pending: list[int] = []

    def recorded() -> Iterator[int]:
        for token in ids:
            pending.append(token)
            yield token

    for piece in tokenizer.stream(recorded()):
        *incomplete, last = pending
        pending.clear()
        yield from ((token, "") for token in incomplete)
        yield last, piece
    yield from ((token, "") for token in pending)


def label(tokenizer: Tokenizer, token: int) -> str:
    """A token alone: its text, or its name in the vocabulary."""
    text = tokenizer.decode([token])
    return text if text.strip("\ufffd") else tokenizer.backend.id_to_token(token) or ""


def same_tokenizer(models: Sequence[LoadedModel]) -> bool:
    """Whether token ids mean the same in all of these models."""
    return len({model.tokenizer.hash for model in models}) == 1


# --- the prompt


def continuations(
    models: Sequence[LoadedModel], prompt: str, max_new_tokens: int, sampling: Sampling
) -> Iterator[dict[str, Any]]:
    """Yield a row for each new token, of the models in turn: its text, its rank, its lead, the likeliest tokens.

    `rank` is 1 for the largest logit. `lead` is the token's logit minus that of the best other one, below 0 where it
    was drawn although another is likelier. Both are read off the raw logits: there is no softmax. Raises UserError.
    """
    require(0 <= max_new_tokens <= MAX_NEW_TOKENS, f"max_new_tokens={max_new_tokens}", f"0 to {MAX_NEW_TOKENS}")
    prompts = [[model.tokenizer.begin, *model.tokenizer.encode(prompt)] for model in models]
    yield {"same_tokenizer": same_tokenizer(models)}
    streams = {i: _continuation(model, prompts[i], max_new_tokens, sampling) for i, model in enumerate(models)}
    while streams:
        for i in [*streams]:
            if (row := next(streams[i], None)) is None:
                del streams[i]
            else:
                yield {"model": i, **row}


def _continuation(
    model: LoadedModel, prompt: list[int], max_new_tokens: int, sampling: Sampling
) -> Iterator[dict[str, Any]]:
    tokenizer, logits = model.tokenizer, deque[Tensor]()  # of the tokens whose characters are incomplete
    steps = decode(model.net, [prompt], sampling, observe=lambda row: logits.append(row[0].float()))

    def ids() -> Iterator[int]:
        for (token,) in islice(steps, max_new_tokens):
            yield token
            if token in tokenizer.stops:
                return

    for token, text in token_texts(tokenizer, ids()):
        row = logits.popleft()  # (V,)
        values, best = row.topk(min(CANDIDATES, len(row)))
        shares = (values - row.logsumexp(-1)).exp()
        own, first, second = float(row[token]), *values[:2].tolist()
        yield {
            "token": token,
            "text": text,
            "label": label(tokenizer, token),
            "rank": int((row > own).sum()) + 1,
            "lead": own - (second if own == first else first),
            "candidates": [
                (label(tokenizer, i), share) for i, share in zip(best.tolist(), shares.tolist(), strict=True)
            ],
        }


# --- the loss of each token


class _LossByToken:
    """A measure of lm.inference.evaluate: the negative log-likelihood of each target in nats, in order."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def add(self, logits: Tensor, targets: Tensor) -> None:
        nll = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        self.losses += nll[targets != IGNORED].tolist()


def token_losses(model: LoadedModel, ids: Sequence[int]) -> np.ndarray:
    """The loss of each token but the first, in nats, in windows as `evaluate` takes them. Raises UserError."""
    measure = _LossByToken()
    evaluate(model.net, np.array(ids), model.net.seq_len, measures=[measure])
    require(len(measure.losses) == len(ids) - 1, f"run={model.name}", "a model whose losses are numbers")
    return np.array(measure.losses)


def scored_text(models: Sequence[LoadedModel], text: str, passage: int = 0) -> dict[str, Any]:
    """The tokens of a text with the losses of one or two models, and these by the frequency of the token.

    An empty text is a passage of the first model's validation text, in the windows of `evaluate`. The tokens are those
    of the first model, without the one that only begins a text. Of a model with another tokenizer, the loss of a token
    is that of its bytes. Raises UserError.
    """
    first, n_passages = models[0], 0
    if text:
        ids = [first.tokenizer.begin, *first.tokenizer.encode(text)]
        require(len(ids) <= MAX_TEXT_TOKENS, f"text of {len(ids) - 1:,} tokens", f"fewer than {MAX_TEXT_TOKENS:,}")
    else:
        validation, length = first.own_text[0], first.net.seq_len * max(1, PASSAGE // first.net.seq_len)
        n_passages = -(-(len(validation) - 1) // length)
        require(0 <= passage < n_passages, f"passage={passage + 1}", f"1 to {n_passages:,}")
        ids = validation[passage * length : (passage + 1) * length + 1].tolist()
    pieces = [piece for _, piece in token_texts(first.tokenizer, ids[1:])]
    losses = [token_losses(first, ids)]
    for model in models[1:]:
        losses.append(token_losses(model, ids) if same_tokenizer([first, model]) else _spread(model, pieces))
    targets, counts = np.array(ids[1:]), first.counts
    is_text = targets != first.tokenizer.unscored
    return {
        "same_tokenizer": same_tokenizer(models),
        "n_passages": n_passages,
        "n_bytes": sum(len(piece.encode()) for piece in pieces),
        "tokens": [
            {
                "text": piece,
                "label": label(first.tokenizer, token),
                "losses": [float(values[i]) for values in losses],
                "count": None if counts is None else int(counts[token]),
            }
            for i, (token, piece) in enumerate(zip(ids[1:], pieces, strict=True))
            if is_text[i]
        ],
        "bands": [] if counts is None else _bands(counts, targets[is_text], [values[is_text] for values in losses]),
    }


def _spread(model: LoadedModel, pieces: Sequence[str]) -> np.ndarray:
    """The loss of a model on each piece of a text, where that of a token of its own is spread evenly over its bytes."""
    text = "".join(pieces)
    ids = [model.tokenizer.begin, *model.tokenizer.encode(text)]
    own = [piece for _, piece in token_texts(model.tokenizer, ids[1:])]
    if "".join(own) != text:
        raise UserError(
            f"run={model.name}: its tokenizer does not give this text back, so the losses have no difference"
        )
    ends, own_ends = (np.cumsum([0, *(len(piece.encode()) for piece in row)]) for row in (pieces, own))
    return np.diff(np.interp(ends, own_ends, np.cumsum([0.0, *token_losses(model, ids)])))


def _bands(counts: np.ndarray, ids: np.ndarray, losses: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """The mean losses of the tokens (n,) in each band of frequency in the training text, the most frequent first."""
    bands = frequency_bands(counts)
    rows = []
    for band in np.unique(bands[ids]):
        inside, frequencies = bands[ids] == band, counts[bands == band]
        rows.append(
            {
                "least": int(frequencies.min()),
                "most": int(frequencies.max()),
                "n_tokens": int(inside.sum()),
                "losses": [float(values[inside].mean()) for values in losses],
            }
        )
    return rows


# --- the matrices


@torch.no_grad()
def embeddings(model: LoadedModel, text: str, token: int | None = None) -> dict[str, Any]:
    """The nearest neighbours of a token by cosine in the input and output embeddings, and the norms of both.

    Without an id it is the first token of the text. Raises UserError for a text without a token.
    """
    net, tokenizer = model.net, model.tokenizer
    ids = tokenizer.encode(text) if token is None else [token]
    require(bool(ids), "token", "a text of at least one character")
    require(0 <= ids[0] < tokenizer.vocab_size, f"id={ids[0]}", f"0 to {tokenizer.vocab_size - 1}")
    output = net.head.matrix(net.embed.weight)
    matrices = [matrix[: tokenizer.vocab_size].float() for matrix in (net.embed.matrix(), output)]  # (V, D)
    cosines = [F.cosine_similarity(matrix, matrix[ids[0]], dim=-1) for matrix in matrices]  # (V,)
    both = F.cosine_similarity(matrices[0], matrices[1], dim=-1)  # (V,): of the two rows of each token
    counts = model.counts
    return {
        "name": model.name,
        "token": label(tokenizer, ids[0]),
        "n_tokens": len(ids),
        "is_one_matrix": output is net.embed.weight,
        "own_cosine": float(both[ids[0]]),
        "mean_cosine": float(both.mean()),
        "neighbours": [_nearest(tokenizer, row, ids[0]) for row in cosines],
        "norms": [] if counts is None else _norms(counts[: tokenizer.vocab_size], matrices),
    }


def _nearest(tokenizer: Tokenizer, cosines: Tensor, token: int) -> list[tuple[str, float, int]]:
    best = cosines.topk(min(NEIGHBOURS + 1, len(cosines)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(label(tokenizer, i), value, i) for i, value in pairs if i != token][:NEIGHBOURS]


def _norms(counts: np.ndarray, matrices: Sequence[Tensor]) -> list[list[float]]:
    """How often a token occurs and the norms of its rows, for tokens spread evenly over the order by frequency."""
    order = np.argsort(counts, kind="stable")
    chosen = order[:: -(-len(order) // MAX_POINTS)]
    norms = [matrix.norm(dim=-1).cpu().numpy() for matrix in matrices]
    return [[float(values[i]) for values in (counts, *norms)] for i in chosen]


# --- the runs


def described_run(name: str, path: Path) -> dict[str, Any]:
    """What the list shows of a run, finished or not, with its validation loss over training tokens."""
    run = read_run(path, name)
    try:
        has_model = bool(model_folder(path))
    except (UserError, OSError):
        has_model = False
    points: list[tuple[float, float]] = []
    if run.status != "broken":
        losses = curve(read_curves(path), "val/loss")
        chosen = {i * (len(losses) - 1) // (MAX_POINTS - 1) for i in range(MAX_POINTS if len(losses) else 0)}
        points = [(float(losses.index[i]), float(losses.iloc[i])) for i in sorted(chosen)]
    scores = {key: run.result.get(key) for key in ("val_loss", "val_bpb", "n_params")}
    scores = {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in scores.items()}
    status = {"status": run.status, "note": run.note}
    if run.status == "broken" and has_model:
        status = {"status": "model", "note": "a model without a record of its training"}
    return {"name": name, **status, "has_model": has_model, "head": run["head.name"], **scores, "curve": points}
