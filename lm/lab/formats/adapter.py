"""Adapters as a folder that PEFT loads onto the exported base model."""

import json
import logging
from pathlib import Path

from lm.errors import UserError
from lm.folder import write_weights
from lm.lab.formats.huggingface import architecture_of
from lm.model.linear import is_adapter
from lm.model.transformer import Transformer
from lm.system.files import write_text

log = logging.getLogger(__name__)


def save_adapter(net: Transformer, base: str | None, folder: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors of a model with adapters.

    `base` names the model that the adapters are for. If the architecture joins matrices
    that are separate here, as GPT-2 does, no adapters of the same form exist: the log says so, and nothing is written.
    """
    adapters = {name: tensor for name, tensor in net.state_dict().items() if is_adapter(name)}
    try:
        architecture = architecture_of(net.config)
        if architecture.is_gpt2:
            raise UserError(f"{architecture.name} stores q, k and v as one matrix")
    except UserError as error:
        log.info("%s is not written, PEFT could not use it: %s; model/ holds the merged model", folder, error)
        return
    names = architecture.names(adapters)
    tensors = {f"base_model.model.{name}": adapters[own_name] for name, (own_name,) in names.items()}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": net.config.rank,
        "lora_alpha": net.config.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder.mkdir(exist_ok=True)
    write_weights(folder / "adapter_model.safetensors", tensors)
    write_text(folder / "adapter_config.json", json.dumps(settings, indent=2) + "\n")
