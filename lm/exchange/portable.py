"""A model as a folder: model.safetensors, tokenizer.json and config.json, none of which can run code."""

import json
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from lm.config import BadInput, HeadConfig, ModelConfig
from lm.config.renamed import current
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.exchange.find_model import model_folder
from lm.model.linear import linear_class
from lm.model.transformer import Transformer
from lm.system.files import atomic_file, sha256, write_text

FORMAT = 2  # 1 has old names of settings, see lm/config/renamed.py
FILES = ("model.safetensors", "tokenizer.json")


def save_model(net: Transformer, tokenizer: Tokenizer, folder: Path) -> None:
    """Write model.safetensors, tokenizer.json and, last, config.json, which holds the hashes of the two."""
    folder.mkdir(exist_ok=True)
    net.head.finalise(net.embed.weight)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in net.state_dict().items()}
    with atomic_file(folder, "model.safetensors") as file:
        file.write(save(weights, {"format": "pt"}))
    write_text(folder / "tokenizer.json", tokenizer.to_json())
    config = {
        "format": FORMAT,
        "vocab_size": net.vocab_size,
        "seq_len": net.seq_len,
        "document_separator": net.documents.separator,
        "model": asdict(net.config),
        "head": asdict(net.head_config),
        "sha256": {name: sha256(folder / name) for name in FILES},
    }
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def load_model(run_dir: str | Path, trust: bool = False) -> tuple[Transformer, Tokenizer]:
    """The model and tokenizer of a run directory (or of its model/ folder), ready to generate, on the CPU.

    `trust` allows importing the module of the run's model.linear. Raises BadInput naming the file that is missing or
    damaged.

    >>> load_model("runs/absent")
    Traceback (most recent call last):
    lm.config.checks.BadInput: run_dir=runs/absent: no such folder; expected a run directory that train wrote
    """
    folder = model_folder(run_dir)
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        if config["format"] not in (1, FORMAT):
            raise ValueError(f"format {config['format']}, this version reads 1 and {FORMAT}")
        config = current(config)
        model, head = ModelConfig(**config["model"]), HeadConfig(**config["head"])
        linear_class(model.linear, trust)
        for name in FILES:
            if sha256(folder / name) != config["sha256"][name]:
                raise BadInput(f"{folder / name}: damaged, its bytes do not match config.json")
        if not config["seq_len"] >= 1:
            raise ValueError(f"seq_len={config['seq_len']}: expected 1 or more")
        net = Transformer(
            model,
            head,
            vocab_size=config["vocab_size"],
            seq_len=config["seq_len"],
            document_separator=config.get("document_separator"),
        )
        net.load_state_dict(load_file(folder / "model.safetensors"))
    except BadInput:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
        raise BadInput(f"{path}: {str(error).splitlines()[0]}; expected what train wrote") from error
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    if tokenizer.vocab_size != net.vocab_size:
        raise BadInput(f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model {net.vocab_size}")
    if net.documents.separator not in (None, tokenizer.eot):
        found = f"document_separator={net.documents.separator}"
        raise BadInput(f"{path}: {found}, expected {tokenizer.eot}, the tokenizer's end-of-text token, or null")
    return net.eval(), tokenizer
