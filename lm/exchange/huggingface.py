"""A model as a Hugging Face folder that AutoModelForCausalLM loads with no code of ours.

Written with safetensors and json alone; transformers is needed only by whoever loads it.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save

from lm.config import BadInput
from lm.data.tokenizer import EOT, Tokenizer
from lm.exchange.architectures import translate
from lm.model.transformer import Transformer
from lm.system.files import whole_file, write_text


def export(net: Transformer, tokenizer: Tokenizer, output_dir: str | Path) -> str:
    """Write config.json, model.safetensors and the tokenizer's files; returns the architecture's name.

    Raises BadInput naming the switch that no architecture of transformers expresses.
    """
    folder = Path(output_dir).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"output_dir={output_dir}: is there already; name a new or an empty folder")
    name, settings, weights = translate(net)
    looked_up, scoring = net.embed.matrix(), net.head.matrix(net.embed.weight)
    tied = looked_up is scoring
    if not tied:
        weights["lm_head.weight"] = scoring
    config = {
        "architectures": [name],
        "vocab_size": net.vocab_size,
        "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.eot,
        "eos_token_id": tokenizer.eot,
        "pad_token_id": tokenizer.eot,
        "dtype": "float32",
        **settings,
    }
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), EOT)
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {key: value for key, value in config.items() if key.endswith("_token_id")},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",  # the name that transformers 4 knows too
            "model_max_length": net.seq_len,
            "clean_up_tokenization_spaces": False,
            **special,
        },
        "special_tokens_map.json": special,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"output_dir={output_dir}: {error.strerror}; expected a folder to write to") from error
    with whole_file(folder, "model.safetensors") as file:
        file.write(save({key: value.detach().cpu().contiguous() for key, value in weights.items()}, {"format": "pt"}))
    layout = json.loads(tokenizer.to_json())
    layout["post_processor"] = begin_with(tokenizer.eot)
    write_text(folder / "tokenizer.json", json.dumps(layout, ensure_ascii=False))
    for filename, content in files.items():
        write_text(folder / filename, json.dumps(content, indent=2) + "\n")
    return name


def begin_with(eot: int) -> dict[str, Any]:
    """A post-processor of `tokenizers` that puts end of text before a text, as our own generate does."""
    special = {"SpecialToken": {"id": EOT, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, second],
        "special_tokens": {EOT: {"id": EOT, "ids": [eot], "tokens": [EOT]}},
    }
