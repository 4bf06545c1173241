"""A file from an http(s) address, within limits: strangers' servers may send without end."""

import http.client
import logging
import os
from collections.abc import Iterator
from glob import escape
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import unquote, urlparse
from urllib.request import Request, urlopen

from tqdm import tqdm

from lm.config import UserError
from lm.data.cache import locked, partial_folder
from lm.data.documents import first_line
from lm.system.files import json_sha256

MOST_BYTES = 32 << 30
TIMEOUT = 30.0  # seconds without a byte
BLOCK = 1 << 20
HEADERS = {"User-Agent": "lm-lab", "Accept-Encoding": "identity"}  # a compressed body could grow a thousandfold
log = logging.getLogger(__name__)


class Refused(Exception):
    """What the server sends is not wanted."""


def download(url: str, cache: Path, max_bytes: int | None = None) -> Path:
    """A local copy, which is kept in `cache` until the server names another version; of a text, the first `max_bytes`.

    An earlier copy is used, with a warning, if the server cannot be reached. Whether it is the text that
    is wanted, the caller tells by its hash. Raises UserError if there is none within MOST_BYTES and TIMEOUT, or if it
    breaks off.
    """
    of, name = json_sha256([url, max_bytes])[:16], Path(unquote(urlparse(url).path)).name or "index"
    try:
        with urlopen(Request(url, headers=HEADERS), timeout=TIMEOUT) as answer:
            version = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            path = cache / "downloads" / f"{of}-{json_sha256(version)[:16]}" / name
            if version is None or not path.exists():
                keep(checked(answer, max_bytes), path, replacing=version is None)
            return path
    except (http.client.HTTPException, ValueError, Refused) as error:
        if isinstance(error, UserError):  # of the cache
            raise
        raise unusable(url, error) from error
    except OSError as error:
        if isinstance(error, HTTPError):  # its filename is the address, or one that the server leads to
            error.close()
        elif error.filename is not None:  # of the disk
            raise
        elif copies := [*(cache / "downloads").glob(f"{of}-*/{escape(name)}")]:
            log.warning("data.path=%s: could not be reached (%s); its last copy is used", url, first_line(error))
            return max(copies, key=lambda one: one.stat().st_mtime)
        raise unusable(url, error) from error


def unusable(url: str, error: Exception) -> UserError:
    why = str(error) if isinstance(error, Refused) else first_line(error)
    return UserError(f"data.path={url}: could not be downloaded ({why}); give data.path=FILE, a local copy")


def keep(blocks: Iterator[bytes], path: Path, replacing: bool) -> None:
    with locked(path.parent), partial_folder(path.parent) as partial:
        if path.exists() and not replacing:  # another process was first
            return
        with open(partial / path.name, "wb") as file:
            for block in blocks:
                try:
                    file.write(block)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, str(path)) from error
        path.parent.mkdir(exist_ok=True)
        os.replace(partial / path.name, path)


def checked(answer: http.client.HTTPResponse, max_bytes: int | None) -> Iterator[bytes]:
    """The body in blocks, with a progress bar on a terminal."""
    if (encoding := answer.headers.get("Content-Encoding", "identity")) != "identity":
        raise Refused(f"it is sent compressed by {encoding}, which was not asked for")
    said, read = answer.headers.get("Content-Length"), 0
    total = int(said) if said else None
    most = MOST_BYTES if max_bytes is None else max_bytes + 1  # so that the text is known to go on
    if max_bytes is None and (total or 0) > most:
        raise Refused(f"{total} bytes, expected at most {most}")
    with tqdm(total=total, desc="downloading", unit="B", unit_scale=True, disable=None, leave=False, delay=1) as bar:
        while read < most and (block := answer.read(min(BLOCK, most - read))):
            yield block
            read += len(block)
            bar.update(len(block))
    if max_bytes is None and read >= most:
        raise Refused(f"more than {most} bytes")
    if total is not None and read < min(total, most):
        raise Refused(f"it breaks off after {read} of {total} bytes")
