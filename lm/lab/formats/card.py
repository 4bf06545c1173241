"""The model card of an exported folder: README.md, with the metadata that the Hugging Face Hub reads."""

import shlex
from pathlib import Path
from typing import Any

from lm.config import flat
from lm.data.ngram import ngram_figure
from lm.errors import without_secrets
from lm.lab.report.pages import render
from lm.lab.runs.find import described_settings
from lm.model.size import n_params
from lm.model.transformer import Transformer
from lm.system.files import write_text
from lm.system.terminal import to_override_value

WIDTH = 110  # columns of the command


def write_card(
    folder: Path, net: Transformer, settings: dict[str, Any], result: dict[str, Any], prompt: str = ""
) -> None:
    """Write README.md. `settings` and `result` are config.yaml and result.json of the run, empty if there are none.

    The example continues `prompt`, whose characters the tokenizer must know.
    """
    settings = without_secrets(flat(settings))
    sha256, start = (settings.get(f"init_record.{key}") for key in ("sha256", "path"))
    context = {
        "title": folder.resolve().name,
        "n_params": n_params(net),
        "seq_len": net.seq_len,
        "prompt": prompt[: net.seq_len // 8],  # half of the context, if each character has four tokens
        "new_tokens": min(64, net.seq_len // 2),
        "settings": settings,
        "result": result,
        "ngram": ngram_figure(result),
        "base": f"{Path(str(start)).name} ({sha256[:16]})" if sha256 else None,
        "command": _command(settings),
    }
    write_text(folder / "README.md", render("card.md.j2", **context))


def _command(settings: dict[str, Any]) -> str:
    """Return the command that trains the same run, without the folders of this machine."""
    not_typed = ("data_hash", "tokenizer_hash")  # of the text and the tokenizer, which `train` finds out
    own = {key: value for key, value in described_settings(settings).items() if key not in not_typed}
    own |= {key.removeprefix("requested."): settings[key] for key in settings if key.startswith("requested.")}
    if settings.get("init_from"):
        own = {"init_from": settings["init_from"]} | own
        own.pop("tokenizer.path", None)  # init_from has the same tokenizer
    local = {"init_from", "data.path", "data.val_path", "tokenizer.path"}
    local -= {"data.path"} if settings.get("data.source") == "hub" else set()  # which is a name there
    own |= {key: Path(str(own[key])).name for key in local if own.get(key) and "://" not in str(own[key])}
    lines = ["lm-lab train"]
    for key, value in own.items():
        word = shlex.quote(f"{key}={to_override_value(value)}")
        if len(f"{lines[-1]} {word}") > WIDTH:
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)
