"""What all formats share: the folder that an export writes, and the check that no number became infinite."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers
from torch import nn

from lm.data.tokenizer import BYTES
from lm.errors import UserError
from lm.system.files import remove_partial

UNFINISHED = ".unfinished"  # in a folder to which an export has not yet written everything


@contextmanager
def new_folder(output_dir: str | Path) -> Iterator[Path]:
    """Yield an empty folder, or one that an export has left unfinished. Raises UserError for any other folder."""
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir={output_dir}: is a file; choose a new or an empty folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / UNFINISHED).exists():
        raise UserError(f"output_dir={output_dir}: is not empty; choose a new or an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / UNFINISHED).touch()
    except OSError as error:
        raise UserError(f"output_dir={output_dir}: {error.strerror}; expected a folder to write to") from error
    remove_partial(folder)
    yield folder
    (folder / UNFINISHED).unlink()


def is_byte_level(layout: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json is plain byte-level BPE with all bytes, as this project makes it."""
    model = layout["model"]
    return (
        layout["normalizer"] is None
        and layout["pre_tokenizer"] == json.loads(BYTES.__getstate__())
        and (layout["decoder"] or {}).get("type") == "ByteLevel"
        and "merges" in model
        and not any(model.get(key) for key in ("ignore_merges", "end_of_word_suffix", "continuing_subword_prefix"))
        and model["vocab"].keys() >= {*pre_tokenizers.ByteLevel.alphabet()}
        and all(token["special"] for token in layout["added_tokens"])  # no text produces these
    )


def check_weights(net: nn.Module) -> None:
    """Raise UserError if a weight of a model is infinite or NaN, as after a training that diverged."""
    for name, weight in net.named_parameters():
        if not weight.isfinite().all():
            raise UserError(f"{name}: has numbers that are not finite; expected a model whose training did not diverge")


def check_finite(name: str, values: np.ndarray, dtype: str) -> None:
    """Raise UserError if numbers of a tensor have become infinite in the dtype of an export."""
    if not np.isfinite(values).all():
        raise UserError(f"dtype={dtype}: {name} has numbers beyond it; expected finite ones, up to 65,504 in f16")
