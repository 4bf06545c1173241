"""Texts from sources of a test."""

import json
from dataclasses import dataclass

import numpy as np

from lm.config import TokenizerConfig
from lm.data.text import read

BYTE = TokenizerConfig(kind="byte", vocab_size=None)


@dataclass(slots=True)
class Listed:
    """A source of documents that are given, each as a name and a text."""

    pairs: list[tuple[str, str]]
    place: str = "data.path=listed"

    def state(self):
        return repr(self.pairs)

    def documents(self):
        for name, text in self.pairs:
            yield name, [text.encode()] * bool(text)


def stored(folder, pairs):
    """Documents, each a name and a text, as a text on disk."""
    return read(Listed(pairs), folder / "text")


def write_rows(path, texts):
    """Write a table of JSON Lines, a row for each text; return its path."""
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def texts(part):
    """The texts of the documents of a part."""
    contents, text = [], b""
    for block, last in part.blocks():
        text += block
        if last:
            contents.append(text.decode())
            text = b""
    return contents


def documents(data):
    """The documents of the training and the validation text."""

    def decoded(ids):
        starts = np.flatnonzero(ids == data.tokenizer.eot)
        return [data.tokenizer.decode(part[1:].tolist()) for part in np.split(np.asarray(ids), starts)[1:]]

    return decoded(data.train), decoded(data.val)
