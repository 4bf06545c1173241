"""A model as a Hugging Face folder that AutoModelForCausalLM loads without any code of this project.

It is written with safetensors and json alone; only loading it needs transformers.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers.processors import TemplateProcessing

from lm.data.tokenizer import Tokenizer
from lm.errors import UserError
from lm.folder import write_weights
from lm.lab.formats.architectures import Architecture, Weights, architecture_of
from lm.model.linear import Linear
from lm.model.transformer import Transformer
from lm.system.files import remove_partial, write_text

UNFINISHED = ".unfinished"  # in a folder to which an export has not yet written everything


def export(
    net: Transformer, tokenizer: Tokenizer, output_dir: str | Path, also: Callable[[Path], object] = lambda _: None
) -> str:
    """Write config.json, model.safetensors and the tokenizer's files; returns the architecture's name.

    `also` is called with the folder and may add files.

    Raises UserError naming the setting that no architecture of transformers has.
    """
    architecture = architecture_of(net.config)
    weights = matrices(net, architecture)
    config = {
        "architectures": [architecture.name],
        "vocab_size": net.vocab_size,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": tokenizer.begin,
        "eos_token_id": tokenizer.eot,
        "pad_token_id": tokenizer.eot,
        "dtype": "float32",
        **architecture.settings(net.config, net.seq_len),
    }
    eot = tokenizer.eot_token
    special = {"bos_token": tokenizer.begin_token, "eos_token": eot, "pad_token": eot}
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {key: config[key] for key in config if key.endswith("_token_id")},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",  # a class that transformers 4 has too
            "model_max_length": net.seq_len,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,  # a text that spells a special token is ordinary text
            "model_input_names": ["input_ids", "attention_mask"],  # without token_type_ids, which transformers 4 adds
            "padding_side": "left",  # so that a batch of prompts of unequal length is continued as each alone
            **special,
        },
        "special_tokens_map.json": special,
    }
    with new_folder(output_dir) as folder:
        write_weights(folder / "model.safetensors", weights)
        write_text(folder / "tokenizer.json", _with_template(tokenizer))
        for filename, content in files.items():
            write_text(folder / filename, json.dumps(content, indent=2) + "\n")
        also(folder)
    return architecture.name


@contextmanager
def new_folder(output_dir: str | Path) -> Iterator[Path]:
    """An empty folder, or one that an export has left unfinished. Raises UserError if it cannot be had."""
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


def matrices(net: Transformer, architecture: Architecture) -> Weights:
    """All weights under the architecture's names; without lm_head.weight if the model is tied."""
    if not all(type(module) is Linear for name, module in net.named_modules() if name.endswith("_proj")):
        raise UserError(f"model.linear={net.config.linear}: only models with model.linear=linear are exported")
    inputs, outputs = net.embed.matrix(), net.head.matrix(net.embed.weight)
    trunk = {name: tensor for name, tensor in net.state_dict().items() if not name.startswith("head.")}
    weights = architecture.weights(trunk | {"embed.weight": inputs}, net.config)
    return weights if inputs is outputs else weights | {"lm_head.weight": outputs}


def check_finite(name: str, values: np.ndarray, dtype: str) -> None:
    """Raise UserError if numbers of a tensor have become infinite in the dtype of an export."""
    if not np.isfinite(values).all():
        raise UserError(f"dtype={dtype}: {name} has numbers beyond it; expected finite ones, up to 65,504 in f16")


def _with_template(tokenizer: Tokenizer) -> str:
    """Its tokenizer.json, with a step that puts the first token before a text, as lm.decoding does."""
    backend, name = tokenizers.Tokenizer.from_str(tokenizer.to_json()), tokenizer.begin_token
    templates = {"single": [name, "$A"], "pair": [name, "$A", "$B:1"]}  # lists, for the name may hold a space
    backend.post_processor = TemplateProcessing(**templates, special_tokens=[(name, tokenizer.begin)])
    return backend.to_str()
