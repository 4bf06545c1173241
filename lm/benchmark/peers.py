"""The same weights in transformers, by way of the project's own export."""

import contextlib
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lm.export import export
from lm.model.transformer import Transformer
from lm.tokenizer import byte_tokenizer


def in_transformers(net: Transformer) -> Any | None:
    """The model as AutoModelForCausalLM gives it; None where transformers is not installed."""
    if find_spec("transformers") is None:
        return None
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(ImportError):
        export(net, byte_tokenizer(), Path(folder) / "out")
        return AutoModelForCausalLM.from_pretrained(Path(folder) / "out").to(net.embed.weight.device)  # type: ignore[arg-type]
    return None
