"""Where text comes from: named documents, split into training and validation text.

Plain text is read by ourselves, because an error must name the file and the byte; every other format, and the Hub, is
the `datasets` library's business.
"""

import hashlib
import os
import sysconfig
from pathlib import Path
from urllib.parse import unquote, urlparse

from lm.config import BadInput, DataConfig, TokenizerConfig
from lm.data.documents import Document, first_line, is_url, local_files, read_text
from lm.data.rows import SUFFIXES, table

LEFT_OUT = ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3")


def stdlib() -> list[Document]:
    """The source of the running interpreter's standard library, without tests and tables; no download."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in LEFT_OUT]  # site-packages may be a hundred times as large
        files += (Path(folder, name) for name in names if name.endswith(".py") and name not in LEFT_OUT)
    machine = ("_sysconfigdata", "config-")  # paths of the machine
    files = sorted(file for file in files if not file.relative_to(root).parts[0].startswith(machine))
    documents = [read_text(file, file.relative_to(root).as_posix()) for file in files]
    if sum(len(document.text) for document in documents) < 1_000_000:
        raise BadInput(f"{root}: this Python ships without its source; give your own text: data=text data.path=FILE")
    return documents


def download(url: str) -> Path:
    """The local copy of a plain http(s) URL; `datasets` keeps it until the server's ETag changes."""
    from datasets import DownloadConfig, DownloadManager

    try:
        return Path(DownloadManager(download_config=DownloadConfig(disable_tqdm=True, max_retries=1)).download(url))
    except Exception as error:
        raise BadInput(
            f"data.path={url}: could not be downloaded ({first_line(error)}); give data.path=FILE, a copy"
        ) from error


def text(config: DataConfig) -> list[Document]:
    assert config.path is not None
    if is_url(config.path):
        found = [read_text(download(config.path), Path(unquote(urlparse(config.path).path)).name)]
    else:
        root, files = local_files(config.path)
        found = [read_text(file, file.relative_to(root).as_posix()) for file in files]
    if config.sha256 is not None:
        hashes = [hashlib.sha256(document.text.encode()).hexdigest() for document in found]
        if hashes != [config.sha256.lower()]:
            what = f"has {hashes[0]}" if len(hashes) == 1 else f"is {len(hashes)} files"
            raise BadInput(f"data.path={config.path}: {what}, expected one file of data.sha256={config.sha256}")
    return found


def look_for(config: DataConfig, tokenizer: TokenizerConfig) -> None:
    """Raise BadInput where a local path means no file: to be called before what takes seconds to import."""
    if tokenizer.path is not None and not Path(tokenizer.path).is_file():
        raise BadInput(f"tokenizer.path={tokenizer.path}: no such file; expected a tokenizer.json")
    if config.source in ("text", *SUFFIXES) and config.path and not is_url(config.path):
        local_files(config.path, SUFFIXES.get(config.source, ()))


def load_documents(config: DataConfig) -> list[Document]:
    """The corpus that a run asks for, empty documents dropped. Raises BadInput if nothing is left."""
    source = {"stdlib": lambda _: stdlib(), "text": text}.get(config.source, table)
    documents = [document for document in source(config) if document.text]
    if not documents:
        raise BadInput(f"data.path={config.path}: the text is empty")
    return documents


def content_hash(documents: list[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.text):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()


def split(documents: list[Document], val_fraction: float) -> tuple[list[str], list[str]]:
    """Training and validation texts.

    A single text is cut, as the usual benchmarks do: its first characters train, its last validate. Of several,
    each document falls on the side that the hash of its name says, whatever the others are; where that leaves a
    side empty, the document nearest to it changes over.
    """
    if len(documents) == 1:
        whole = documents[0].text
        cut = min(int(len(whole) * (1 - val_fraction)), len(whole) - 1)
        return [whole[:cut]], [whole[cut:]]

    def place(document: Document) -> float:
        return int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:8], "big") / 2**64

    ranked = sorted(documents, key=place)
    n_val = sum(place(document) < val_fraction for document in ranked)
    n_val = min(max(n_val, 1), len(ranked) - 1)
    chosen = {document.name for document in ranked[:n_val]}
    train = [document.text for document in documents if document.name not in chosen]
    return train, [document.text for document in documents if document.name in chosen]
