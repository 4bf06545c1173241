"""The folder of an ablation: whose it is, and who is at work in it."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import filelock

from lm.ablation.record import FILE, AblationRecord, asked, read_record
from lm.ablation.run.task import TOKEN
from lm.config import UserError
from lm.config.ablation import AblateConfig
from lm.system.files import STALE_SECONDS, remove_partial

LOCK = ".lock"
READABLE = 40  # characters of the overrides in a folder's name


def default_dir(config: AblateConfig) -> Path:
    """ablations/ and the name; other overrides make another folder, whose name says some of them and ends in a hash."""
    if not config.overrides:
        return Path("ablations") / config.ablation.name
    digest = hashlib.sha256(json.dumps(config.overrides).encode()).hexdigest()[:8]
    said = "-".join(re.sub(r"^[^=]*[.]|(?<==).*/", "", word) for word in config.overrides)  # max_steps=300
    plain = re.sub(r"[^\w.=+-]+", "_", said)[:READABLE].strip("-_.")
    return Path("ablations") / f"{config.ablation.name}-{plain}-{digest}"


def earlier(path: Path, config: AblateConfig) -> AblationRecord:
    """What an earlier call has left in the folder, or an empty record. Raises UserError for another ablation's."""
    if not (path / FILE).exists():
        if path.exists() and (not path.is_dir() or any(one.name not in (LOCK, TOKEN) for one in path.iterdir())):
            raise UserError(f"output_dir={path}: holds no ablation; name a new or an empty folder")
        return AblationRecord(**asked(config.ablation))
    record, question = read_record(path), config.ablation
    both = [("name", record.name, question.name), ("metric", record.metric, question.metric)]
    for key, there, here in [*both, ("overrides", record.overrides, config.overrides)]:
        if there != here:
            found = f"{key} is {there} there, {here} now"
            raise UserError(f"output_dir={path}: holds another ablation ({found}); name another output_dir")
    return record


@contextlib.contextmanager
def claim(path: Path) -> Iterator[None]:
    """Hold the folder while working in it. Raises UserError if another process does.

    A folder made here in which nothing was begun is taken away.
    """
    lock = filelock.FileLock(path / LOCK)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise UserError(f"output_dir={path}: another process is at work there") from None
    except OSError as error:
        raise UserError(f"output_dir={path}: cannot be written to ({error.strerror})") from error
    try:
        remove_partial(path, older_than=STALE_SECONDS)  # a report, or a run on another node, may be writing now
        yield
    finally:
        if not (path / FILE).exists():
            for name in (LOCK, TOKEN):
                (path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody else's files are in it
                for folder in made:
                    folder.rmdir()
        lock.release()
