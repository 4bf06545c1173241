"""How a model was made to converse, as its folder of transformers says it: carried along, for an export to say again.

A run that starts from such a folder keeps it in its model/chat.json.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lm.config import UserError, require
from lm.config.checks import build, reading
from lm.data.tokenizer import Chat, Tokenizer
from lm.system.files import read_json, write_json

CHAT = "chat.json"
NAMES = "tokenizer_config.json"  # of transformers: says which token is which
TEMPLATE = "chat_template.jinja"  # of transformers


def save_chat(chat: Chat, folder: Path) -> None:
    """Write chat.json into the folder of a model, if it has anything to say."""
    if chat != Chat():
        write_json(folder / CHAT, asdict(chat))


def read_chat(folder: Path, tokenizer: Tokenizer) -> None:
    """Give the tokenizer of a model's folder what chat.json says, if there is one. Raises UserError."""
    path = folder / CHAT
    if path.exists():
        with reading(path):
            chat = build(Chat, read_json(path))
            is_token = chat.eos_token is None or tokenizer.backend.token_to_id(chat.eos_token) is not None
            require(is_token, f"eos_token={chat.eos_token}", "a token of the tokenizer")
        tokenizer.chat = chat
        tokenizer.stops |= {*chat.stops}


# --- a folder of transformers


def read_names(folder: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; {} if there is no such file, or a damaged one."""
    with suppress(OSError, UserError), reading(folder / NAMES):
        return read_json(folder / NAMES)
    return {}


def eos_name(names: dict[str, Any]) -> str | None:
    """The end-of-text token that tokenizer_config.json names, if it names one."""
    name = names.get("eos_token")
    name = name.get("content") if isinstance(name, dict) else name
    return name if isinstance(name, str) else None


def read_published_chat(folder: Path, tokenizer: Tokenizer, ends: Iterable[int]) -> None:
    """Give the tokenizer what the folder says; `ends` are the ids at which its model stops. Raises UserError."""
    names = read_names(folder)
    eos_token = eos_name(names)
    if eos_token == tokenizer.eot_token or tokenizer.backend.token_to_id(eos_token or "") is None:
        eos_token = None
    stops = sorted({*ends} - tokenizer.stops)
    tokenizer.chat = Chat(template=_template(folder, names), eos_token=eos_token, stops=stops)
    tokenizer.stops |= {*stops}


def _template(folder: Path, names: dict[str, Any]) -> str | None:
    """From where transformers looks for it: a file, or else tokenizer_config.json, which may have several by name."""
    if (folder / TEMPLATE).is_file():
        with reading(folder / TEMPLATE, "a chat template"):
            return (folder / TEMPLATE).read_text(encoding="utf-8")
    value = names.get("chat_template")
    with reading(folder / NAMES, "what transformers wrote"):
        if isinstance(value, list):
            value = {row["name"]: row["template"] for row in value}.get("default")
        require(value is None or isinstance(value, str), f"chat_template={value!r:.60}", "a text")
    return value
