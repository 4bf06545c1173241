"""Atomic writes: a file is written under a temporary name, synced to disk, then renamed. JSON that knows its hash."""

import errno
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml

from lm.config import BadInput

MOST_JSON = 16_000_000  # bytes: a hundred times what this program or transformers writes
MOST_YAML = 500_000  # of which the loader in Python, which cannot crash, reads 100,000 in a second


@contextmanager
def atomic_file(folder: Path, name: str | Callable[[Path], str]) -> Iterator[IO[bytes]]:
    """A file to write to, which appears under `name` in `folder` at the end of the context, or not at all on an error.

    `name` may be a function of the finished temporary file.
    """
    descriptor, unnamed = tempfile.mkstemp(dir=folder, prefix=".partial-")
    temporary = Path(unnamed)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~UMASK)
        temporary.replace(folder / (name if isinstance(name, str) else name(temporary)))
        sync_folder(folder)
    except OSError as error:  # for example a full disk: name the final path
        raise OSError(error.errno, error.strerror, str(folder / name if isinstance(name, str) else folder)) from error
    finally:
        temporary.unlink(missing_ok=True)  # it is there after an error only


def make_folder(path: Path) -> None:
    """A folder to write to, in a folder that may be a stranger's. Raises BadInput for a link, which leads elsewhere."""
    if path.is_symlink():
        raise BadInput(f"{path}: is a link; expected a folder, so that nothing is written elsewhere")
    path.mkdir(exist_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_file(path.parent, path.name) as file:
        file.write(text.encode())


def sha256(path: Path) -> str:
    with open(regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_of(value: Any) -> str:
    """The SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with a hash of its own content under "checksum"."""
    write_text(path, json.dumps({**content, "checksum": checksum(content)}, indent=2, allow_nan=False) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """What `write_sealed` has written, without its hash. Raises ValueError if the file holds anything else."""
    return unsealed(read_object(path))


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError if the file holds anything else."""
    try:
        found = json.loads(read_regular(path, MOST_JSON).decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {type(found).__name__}")
    return found


class NotRegular(OSError):
    """A pipe or a device, which could be read without end."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def regular(path: Path) -> Path:
    """The path. Raises NotRegular."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise NotRegular(errno.EINVAL, "is a pipe or a device, expected a file", str(path))
    return path


def read_regular(path: Path, most: int | None = None) -> bytes:
    """The content of a file. Raises NotRegular, and BadInput for more than `most` bytes."""
    if most is None:
        return regular(path).read_bytes()
    with open(regular(path), "rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise BadInput(f"holds {path.stat().st_size:,} bytes, expected at most {most:,}")
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping of a YAML file that a program has written. Raises ValueError or yaml.YAMLError for anything else.

    An alias is refused: nine lines of them can stand for a billion values.
    """
    text = read_regular(path, MOST_YAML).decode()
    deepest = text.count("[") + text.count("{") + max(map(len, text.splitlines()), default=0)
    # the loader in C is ten times as fast, but crashes where the text is nested too deeply
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader) if deepest < 2000 else yaml.SafeLoader
    if "*" in text and any(isinstance(one, yaml.AliasEvent) for one in yaml.parse(text, loader)):
        raise ValueError("holds an alias, expected plain settings")
    found = yaml.load(text, loader)
    if not isinstance(found, dict):
        raise ValueError(f"expected settings, found {type(found).__name__}")
    return found


def unsealed(content: dict[str, Any]) -> dict[str, Any]:
    """The content without its hash. Raises ValueError if the hash is missing or wrong."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    if content.get("checksum") != checksum(rest):
        raise ValueError("damaged, its content does not match its checksum")
    return rest


def without_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """The content without its hash, if it has one: earlier versions wrote none. Raises ValueError if it is damaged."""
    if "checksum" in content:
        return unsealed(content)
    for key in {*[*content][:1], *[*content][-1:]}:  # where it is written
        if content[key] == checksum({other: content[other] for other in content if other != key}):
            raise ValueError(f"damaged, its checksum is called {key!r}")
    return content


def checksum(content: dict[str, Any]) -> str:
    as_read = json.loads(json.dumps(content))  # tuples as lists, all keys as strings
    canonical = json.dumps(as_read, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def sync_folder(path: Path) -> None:
    """Sync a folder, so that a rename inside it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def remove_partial(folder: Path, older_than: float = 0.0) -> None:
    """Delete the temporary files of a killed process. The caller holds the folder's lock.

    Where others write without that lock, theirs are told by their age: those that have changed in the last
    `older_than` seconds stay.
    """
    for path in folder.rglob(".partial-*"):
        with suppress(FileNotFoundError):  # written to its end meanwhile
            if time.time() - path.stat().st_mtime >= older_than:
                path.unlink()


ABANDONED = 600.0  # seconds without a change to a temporary file: its process is gone
UMASK = os.umask(0)
os.umask(UMASK)
