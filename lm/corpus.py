"""Where text comes from: named documents, split into training and validation text.

Plain text is read here, because an error must name the file and the byte; every other format, and the Hub, is the
`datasets` library's business.
"""

import glob
import hashlib
import itertools
import os
import sysconfig
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from lm.config import BadInput, DataConfig

LEFT_OUT = ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3")
HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
SUFFIXES = {"json": (".json", ".jsonl"), "csv": (".csv",), "parquet": (".parquet",)}


@dataclass(slots=True, frozen=True)
class Document:
    name: str  # decides the document's side of the split, so it must not depend on the machine
    text: str


def read_text(path: Path, name: str | None = None) -> Document:
    """One file as one document. Raises BadInput naming the file, and the byte where it is not UTF-8."""
    try:
        return Document(name or path.name, path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 at byte {error.start} ({error.reason})") from error
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error


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


def local_files(path: str, suffixes: tuple[str, ...] = ()) -> tuple[Path, list[Path]]:
    """The folder they are named from, and the files that a file name, folder or glob means, in order of name."""
    try:
        return find(Path(path).expanduser(), suffixes)
    except (OSError, RuntimeError) as error:  # a name too long, a user unknown, a folder closed
        raise BadInput(f"data.path={path}: {getattr(error, 'strerror', None) or error}") from error


def find(here: Path, suffixes: tuple[str, ...]) -> tuple[Path, list[Path]]:
    if here.is_file():
        return here.parent, [here]
    if here.is_dir():
        root, pattern = here, "**/*"
    else:
        fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), here.parts[:-1]))
        root = Path(*fixed)
        pattern = str(here.relative_to(root))
    files = sorted({root / one for one in glob.glob(pattern, root_dir=root, recursive=True)})
    files = [file for file in files if file.is_file() and (not suffixes or file.suffix in suffixes)]
    if not files:
        found = (
            f"a folder without {' or '.join(suffixes) or 'files'}" if here.is_dir() else "no such file, folder or glob"
        )
        raise BadInput(f"data.path={here}: {found}")
    return root, files


def download(url: str) -> Path:
    """The local copy of a plain http(s) URL; `datasets` keeps it until the server's ETag changes."""
    from datasets import DownloadConfig, DownloadManager

    try:
        return Path(DownloadManager(download_config=DownloadConfig(disable_tqdm=True, max_retries=1)).download(url))
    except Exception as error:
        raise BadInput(f"data.path={url}: could not be downloaded ({first_line(error)})") from error


def text(config: DataConfig) -> list[Document]:
    assert config.path is not None
    if config.path.startswith(("http://", "https://")):
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


def table(config: DataConfig) -> list[Document]:
    """json, csv and parquet files, or a data set of the Hub: a document for each row of the named column."""
    assert config.path is not None
    hub, url = config.source == "hub", config.path.startswith(("http://", "https://"))
    files = [] if hub or url else local_files(config.path, SUFFIXES[config.source])[1]
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        if hub:
            rows = from_hub(config)
        else:
            names = [glob.escape(str(file)) for file in files] or config.path
            rows = datasets.load_dataset(config.source, data_files=names, split="train")
    except BadInput as error:
        raise BadInput(f"data.path={config.path}: {error}") from error
    except Exception as error:
        reason = first_line(error.__cause__ or error)
        raise BadInput(f"data.path={config.path}: cannot be read as {config.source} ({reason})") from error
    if config.column not in rows.column_names:
        raise BadInput(f"data.column={config.column}: the columns are {', '.join(rows.column_names)}")
    column = rows[config.column]
    wrong = next((i for i, one in enumerate(column) if not isinstance(one, str)), None)
    if wrong is not None:
        raise BadInput(f"data.column={config.column}: row {wrong} holds {column[wrong]!r}, not a string")
    return [Document(f"row {i}", one) for i, one in enumerate(column)]


def from_hub(config: DataConfig) -> Any:
    """A data set of the Hub; without a network from the cache or not at all, at once and not after five retries."""
    import datasets
    import huggingface_hub.constants

    if reachable(HUB):
        return datasets.load_dataset(config.path, split=config.split)
    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(config.path, split=config.split)
    except Exception as error:
        raise BadInput(f"{HUB} cannot be reached; fetch the data where it can, or name files of your own") from error
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before


def reachable(address: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


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
        cut = int(len(whole) * (1 - val_fraction))
        return [whole[:cut]], [whole[cut:]]

    def place(document: Document) -> float:
        return int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:8], "big") / 2**64

    ranked = sorted(documents, key=place)
    n_val = sum(place(document) < val_fraction for document in ranked)
    n_val = min(max(n_val, 1), len(ranked) - 1)
    chosen = {document.name for document in ranked[:n_val]}
    train = [document.text for document in documents if document.name not in chosen]
    return train, [document.text for document in documents if document.name in chosen]
