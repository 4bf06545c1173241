"""The files that a file name, folder, glob or address stands for, and how one is opened. Imports nothing heavy."""

import errno
import glob
import hashlib
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from lm.config import DataConfig, TokenizerConfig
from lm.errors import UserError, expanded
from lm.registry import load

SUFFIXES = {
    "json": (".json", ".jsonl", ".ndjson", ".jl", ".jsonlines"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
    "tokens": (".bin",),
}
HUB_NAME = r"(\b[\w.-]+\b/)?\b[\w.-]+\b"  # as the Hub takes it
BLOCK = 1 << 20  # bytes that are read at a time
RANGE = 1 << 22  # bytes that are asked for at a time where a server sends any part of a file
HTTP = ("http://", "https://")
TIMEOUT = 30.0  # seconds without an answer or a byte
CACHE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG)
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def is_url(path: str) -> bool:
    return "://" in path


def suffix(path: str | Path) -> str:
    """What a file name ends in, without the suffix of a compression: `.jsonl` for a.jsonl.gz."""
    name = str(path).partition("?")[0] if is_url(str(path)) else str(path)
    stem, last = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if last in COMPRESSED else last


def is_compressed(file: Path) -> bool:
    return file.name.lower().endswith(COMPRESSED)


def kind_of(path: str) -> str:
    """Return the kind of text (a choice of the group data) that a file, folder or glob holds, by endings.

    >>> kind_of("my.txt"), kind_of("rows.jsonl.gz")
    ('text', 'json')
    """
    endings = {suffix(path)}
    with suppress(OSError, UserError):  # an address, or nothing
        endings = {suffix(file) for file in local_files(path).values()}
    return next((kind for kind, suffixes in SUFFIXES.items() if endings <= {*suffixes}), "text")


def text_size(path: str, kind: str, column: str, limit: float) -> int:
    """Return the bytes of a text, decompressed; the bytes of a column in a table. Stops counting at `limit`."""
    if is_url(path):
        files = [downloaded(path, DataConfig().cache, "data.path")]
    else:
        files = [*local_files(expanded(path, "data.path"), SUFFIXES.get(kind, ())).values()]
    n_bytes = 0
    for file in files:
        if kind == "text" and not file.name.lower().endswith(COMPRESSED):
            n_bytes += file.stat().st_size
            continue
        with reading_from(str(file), kind):
            for piece in _pieces(file, kind, column):
                n_bytes += len(piece)
                if n_bytes >= limit:
                    return n_bytes
    return n_bytes


def _pieces(file: Path, kind: str, column: str) -> Iterator[bytes]:
    if kind != "text":
        yield from load("lm.lab.sources.tables.texts_in")(file, kind, column)
        return
    with open_file(file) as content:
        while block := content.read(BLOCK):
            yield block


def check_paths(config: DataConfig, tokenizer: TokenizerConfig) -> None:
    """Raise UserError if a local path leads to no file, or stands where a name of the Hub is expected.

    It can be called before anything heavy is imported.
    """
    if tokenizer.path is not None and not Path(tokenizer.path).is_file():
        raise UserError(f"tokenizer.path={tokenizer.path}: no such file; expected a tokenizer.json")
    if config.source == "hub" and not re.fullmatch(HUB_NAME, str(config.path)):
        advice = f"data=parquet, json or csv data.path={config.path} reads files of this machine"
        raise UserError(f"data.path={config.path}: expected OWNER/NAME with data=hub; {advice}")
    for key, path in {"data.path": config.path, "data.val_path": config.val_path}.items():
        if config.source in ("text", *SUFFIXES) and path and not is_url(path):
            local_files(path, SUFFIXES.get(config.source, ()), key)


def listed(value: str, key: str, folders: bool = False) -> list[str]:
    """The paths that [PATH,PATH] or a glob stands for, in order; of anything else, the one path itself.

    `folders`: of what a glob matches, only the folders. Raises UserError.
    """
    is_list = value.startswith("[") and value.endswith("]") and not os.path.exists(value)
    paths: list[str] = []
    for entry in [part.strip() for part in value[1:-1].split(",")] if is_list else [value]:
        if not entry:
            raise UserError(f"{key}={value}: a path is empty; expected {key}=[PATH,PATH]")
        path = expanded(entry, key)
        if not glob.has_magic(path) or is_url(path) or os.path.exists(path):
            paths.append(path)
            continue
        root = _literal_part(Path(path))
        if glob.has_magic(str(root)):
            path = os.path.join(glob.escape(str(root)), Path(path).relative_to(root))
        matches = [match for match in sorted(glob.glob(path, recursive=True)) if not folders or os.path.isdir(match)]
        if not matches:
            raise UserError(f"{key}={entry}: no such {'folder' if folders else 'file'}, and as a glob it matches none")
        paths += matches
    return paths


def local_files(path: str, suffixes: tuple[str, ...] = (), key: str = "data.path") -> dict[str, Path]:
    """The files of a file name, folder or glob, by their names, which are relative to the folder and sorted.

    `suffixes`: of a folder or glob, only files that end in one of them, compressed or not. Raises UserError, and
    OSError for a folder that cannot be read.
    """
    place = Path(path)
    if place.is_file():
        return {place.name: place}
    if place.is_dir():
        root, files = place, list(_walk(place))
    else:
        root = _literal_part(place)
        pattern = str(place.relative_to(root))
        files = [root / name for name in glob.glob(pattern, root_dir=root, recursive=True)]

    chosen = sorted(file for file in files if (not suffixes or suffix(file) in suffixes) and file.is_file())
    if not chosen:
        kinds = " or ".join(suffixes) or "files"
        what = f"a folder without {kinds}" if place.is_dir() else "no such file, folder or glob"
        raise UserError(f"{key}={path}: {what}")
    return {file.relative_to(root).as_posix(): file for file in chosen}


def from_above(run_dir: Path, path: str | None) -> str | None:
    """Return a relative path from the nearest folder above the run from which it leads somewhere.

    Training was started in that folder. The hash of the text is compared anyway.
    """
    if path is None or Path(path).exists():
        return path
    above = (folder / path for folder in run_dir.resolve().parents)
    return next((str(place) for place in above if place.exists()), path)


def _literal_part(pattern: Path) -> Path:
    """The folders with which a glob begins: those without a wildcard, or that exist as they stand, such as `a [1]`."""
    root = Path()
    for part in pattern.parts[:-1]:
        if glob.has_magic(part) and not (root / part).is_dir():
            break
        root /= part
    return root


def _walk(root: Path) -> Iterator[Path]:
    """The files below a folder, without hidden ones. Links are followed."""
    for folder, subfolders, names in os.walk(root, onerror=raise_error, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def raise_error(error: OSError) -> NoReturn:
    """For os.walk, which would skip a folder that it cannot read."""
    raise error


# --- a file that may be compressed or lie on a server


def downloaded(url: str, cache: Path, key: str = "data.path", downloads: bool = True) -> Path:
    """Return the file to which an address was downloaded, once: later calls need no network.

    Its name ends as the address does. With `downloads=False`, an address that is not in the cache is refused. Raises
    UserError, and OSError of the cache.
    """
    import fsspec

    storage = cache / "downloads"
    try:
        target, path = filesystem_of(url)
        filesystem = fsspec.filesystem(
            "filecache",
            fs=target,
            cache_storage=str(storage),
            expiry_time=False,
            cache_mapper=_name_in_cache,
            skip_instance_cache=True,  # another process may have downloaded the file meanwhile
        )
        if not filesystem._check_file(path):
            if not downloads:
                raise UserError(f"{key}={url}: is not in {storage}; give a text: data=text data.path=FILE")
            target.info(path)  # raises what the server says, where `open` says that there is no such file
        with filesystem.open(path) as file:
            return Path(file.name)
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in CACHE_ERRORS:
            raise OSError(error.errno, error.strerror, str(error.filename or storage)) from error
        status = getattr(error.__cause__ or error, "status", None)
        reason = f"status {status}" if status else first_line(error.__cause__ or error)
        raise UserError(f"{key}={url}: could not be downloaded ({reason})") from error


def _name_in_cache(path: str) -> str:
    """A name of its own for each address, with the suffixes by which a reader knows the kind of a file."""
    name = path.partition("?")[0].lower() if path.startswith(HTTP) else path.lower()
    last = os.path.splitext(name)[1]
    return hashlib.sha256(path.encode()).hexdigest()[:32] + suffix(name) + last * (last in COMPRESSED)


def open_file(file: Path | str, seekable: bool = False) -> IO[bytes]:
    """A local file or one at an address, decompressed as its name says."""
    if isinstance(file, Path) and not is_compressed(file):
        return open(file, "rb")
    from fsspec.utils import infer_compression

    filesystem, path = filesystem_of(file)
    is_http = str(file).startswith(HTTP)  # not every server sends parts of a file
    compression = infer_compression(str(file).partition("?")[0] if is_http else path)
    stream = filesystem.open(path, "rb", block_size=0 if is_http else RANGE, compression=compression)
    if seekable and is_http:
        copy = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
        shutil.copyfileobj(stream, copy, BLOCK)
        return copy
    return stream if seekable else io.BufferedReader(stream, BLOCK)


def filesystem_of(file: Path | str) -> tuple[Any, str]:
    """The filesystem of fsspec that a file lies on, and its path there."""
    import aiohttp
    import fsspec
    import pyarrow as pa

    zstd = fsspec.compression.compr.get("zstd") or (lambda raw, **_: pa.CompressedInputStream(raw, "zstd"))
    fsspec.compression.register_compression("zstd", zstd, "zst", force=True)
    if not str(file).startswith(HTTP):
        return fsspec.url_to_fs(str(file))
    timeout = aiohttp.ClientTimeout(None, sock_connect=TIMEOUT, sock_read=TIMEOUT)  # the default ends long downloads
    return fsspec.url_to_fs(file, client_kwargs={"timeout": timeout})


@contextmanager
def reading_from(place: str, kind: str) -> Iterator[None]:
    """Turn what a reader raises into a UserError that names the place."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cure = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        reason = getattr(error, "strerror", None) or first_line(error.__cause__ or error)
        raise UserError(f"{place}: cannot be read as {kind} ({reason}){cure}") from error


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
