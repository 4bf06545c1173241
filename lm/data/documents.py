"""Documents, which are texts with a name, and the files that a path stands for."""

import glob
import itertools
from dataclasses import dataclass
from pathlib import Path

from lm.config import BadInput


@dataclass(slots=True, frozen=True)
class Document:
    name: str  # decides on which side of the split it is, so it must not depend on the machine
    text: str


def read_text(path: Path, name: str | None = None) -> Document:
    """A file as a document. Raises BadInput naming the file, and the byte at which it is not UTF-8."""
    try:
        return Document(name or path.name, path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 at byte {error.start} ({error.reason})") from error
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error


def is_url(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def local_files(path: str, suffixes: tuple[str, ...] = ()) -> tuple[Path, list[Path]]:
    """The files of a file name, folder or glob, sorted by name, after the folder that their names are relative to."""
    try:
        return find(Path(path).expanduser(), suffixes)
    except (OSError, RuntimeError) as error:  # name too long, unknown user, no permission
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


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
