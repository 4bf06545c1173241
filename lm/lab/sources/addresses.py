"""Files at addresses of fsspec: https://, s3://, gs://, hf://. The core reads the file in the cache like any other."""

import errno
import hashlib
import io
import os
from pathlib import Path
from typing import IO, Any

from lm.data.paths import COMPRESSED, extension, open_file
from lm.errors import UserError, named
from lm.system.files import scratch_folder

RANGE = 1 << 22  # bytes that the Hub is asked for at a time
HTTP = ("http://", "https://")
TIMEOUT = 30.0  # seconds without an answer or a byte
CACHE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG)


def downloaded(url: str, cache: Path, key: str = "data.path", downloads: bool = True) -> Path:
    """Return the file to which an address was downloaded, once: later calls need no network.

    The file is named by the hash of the address, and ends as the address does, by which a reader
    knows its kind. With `downloads=False`, an address that is not in the cache is refused. Raises
    UserError, and OSError for the cache.
    """
    name = url.partition("?")[0].lower()
    last = os.path.splitext(name)[1]
    ends = extension(name) + last * (last in COMPRESSED)
    file = cache / "downloads" / (hashlib.sha256(url.encode()).hexdigest()[:32] + ends)
    if file.exists():
        return file
    if not downloads:
        raise UserError(f"{key}={url}: is not in {file.parent}; give a text: data=text data.path=FILE")
    try:
        with scratch_folder(file.parent) as folder:
            filesystem, path = _filesystem(url)
            filesystem.get_file(path, str(folder / file.name))
            (folder / file.name).replace(file)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in CACHE_ERRORS:
            raise OSError(error.errno, error.strerror, str(error.filename or file)) from error
        status = getattr(error.__cause__ or error, "status", None)
        reason = f"status {status}" if status else named(error.__cause__ or error)
        raise UserError(f"{key}={url}: could not be downloaded ({reason})") from error
    return file


def open_anywhere(file: Path | str) -> IO[bytes]:
    """Open a local file (a Path), or a file of the Hub, of which parts are downloaded as they are read.

    The file is decompressed as its name says.
    """
    if isinstance(file, Path):
        return open_file(file)
    from fsspec.utils import infer_compression

    filesystem, path = _filesystem(file)
    stream = filesystem.open(path, "rb", block_size=RANGE, compression=infer_compression(path))
    return io.BufferedReader(stream)


def _filesystem(url: str) -> tuple[Any, str]:
    """Return the filesystem of fsspec for an address, and the path there."""
    import aiohttp
    import fsspec

    if not url.startswith(HTTP):
        return fsspec.url_to_fs(url)
    timeout = aiohttp.ClientTimeout(None, sock_connect=TIMEOUT, sock_read=TIMEOUT)  # the default ends long downloads
    # Some servers send a file NAME.gz as the encoding of NAME, which aiohttp would decode.
    is_compressed = os.path.splitext(url.partition("?")[0].lower())[1] in COMPRESSED
    return fsspec.url_to_fs(url, client_kwargs={"timeout": timeout, "auto_decompress": not is_compressed})
