"""The corpus: named documents from any source, split into training and validation text.

Plain text is read here, so that an error can name the file and the byte. Other formats and the Hub are read by the
`datasets` library.
"""

import hashlib
import os
import sysconfig
from pathlib import Path
from urllib.parse import unquote, urlparse

from lm.config import BadInput, DataConfig, TokenizerConfig
from lm.data.documents import Document, first_line, is_url, local_files, read_text
from lm.data.rows import SUFFIXES, table_documents

EXCLUDED = ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3")


def stdlib() -> list[Document]:
    """The source of the running interpreter's standard library, without tests and code tables; no download."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in EXCLUDED]  # not descended into: site-packages may be large
        files += (Path(folder, name) for name in names if name.endswith(".py") and name not in EXCLUDED)
    local = ("_sysconfigdata", "config-")  # these hold paths of the machine
    files = sorted(file for file in files if not file.relative_to(root).parts[0].startswith(local))
    documents = [read_text(file, file.relative_to(root).as_posix()) for file in files]
    if sum(len(document.text) for document in documents) < 1_000_000:
        raise BadInput(f"{root}: this Python ships without its source; give your own text: data=text data.path=FILE")
    return documents


def download(url: str) -> Path:
    """A local copy of an http(s) URL, which `datasets` caches until the server's ETag changes."""
    from datasets import DownloadConfig, DownloadManager

    try:
        return Path(DownloadManager(download_config=DownloadConfig(disable_tqdm=True, max_retries=1)).download(url))
    except Exception as error:
        raise BadInput(
            f"data.path={url}: could not be downloaded ({first_line(error)}); give data.path=FILE, a local copy"
        ) from error


def text_documents(config: DataConfig) -> list[Document]:
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


def check_paths(config: DataConfig, tokenizer: TokenizerConfig) -> None:
    """Raise BadInput if a local path leads to no file. It imports nothing heavy, so it can be called first."""
    if tokenizer.path is not None and not Path(tokenizer.path).is_file():
        raise BadInput(f"tokenizer.path={tokenizer.path}: no such file; expected a tokenizer.json")
    if config.source in ("text", *SUFFIXES) and config.path and not is_url(config.path):
        local_files(config.path, SUFFIXES.get(config.source, ()))


def load_documents(config: DataConfig) -> list[Document]:
    """The documents of a run, without empty ones. Raises BadInput if there are none."""
    source = {"stdlib": lambda _: stdlib(), "text": text_documents}.get(config.source, table_documents)
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

    A single text is cut once, as in the usual benchmarks: its beginning is for training, its end for validation. Of
    several documents, the hash of each one's name decides its side, independently of the others; if a side would be
    empty, the document whose hash is nearest moves to it.
    """
    if len(documents) == 1:
        whole = documents[0].text
        cut = min(int(len(whole) * (1 - val_fraction)), len(whole) - 1)
        return [whole[:cut]], [whole[cut:]]

    def position(document: Document) -> float:
        return int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:8], "big") / 2**64

    ranked = sorted(documents, key=position)
    n_val = sum(position(document) < val_fraction for document in ranked)
    n_val = min(max(n_val, 1), len(ranked) - 1)
    chosen = {document.name for document in ranked[:n_val]}
    train = [document.text for document in documents if document.name not in chosen]
    return train, [document.text for document in documents if document.name in chosen]
