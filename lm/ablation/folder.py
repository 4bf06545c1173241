"""The folder of an ablation: its name, what it holds, and the lock of the process that works in it."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import filelock

from lm.ablation.record import FILE, AblationRecord, read_record
from lm.config import UserError
from lm.config.ablation import AblateConfig

LOCK = ".lock"
MAX_OVERRIDES = 40  # characters of the overrides in a folder's name


def default_dir(config: AblateConfig) -> Path:
    """ablations/ and the name; other overrides make another folder, whose name has some of them and ends in a hash."""
    if not config.overrides:
        return Path("ablations") / config.ablation.name
    digest = hashlib.sha256(json.dumps(config.overrides).encode()).hexdigest()[:8]
    overrides = "-".join(re.sub(r"^[^=]*[.]|(?<==).*/", "", override) for override in config.overrides)
    plain = re.sub(r"[^\w.=+-]+", "_", overrides)[:MAX_OVERRIDES].strip("-_.")  # max_steps=300
    return Path("ablations") / f"{config.ablation.name}-{plain}-{digest}"


def existing_record(path: Path, config: AblateConfig) -> AblationRecord | None:
    """What an earlier call has left in the folder, if anything. Raises UserError if it is another ablation's."""
    if not (path / FILE).exists():
        if path.exists() and (not path.is_dir() or any(entry.name != LOCK for entry in path.iterdir())):
            raise UserError(f"output_dir={path}: holds no ablation; name a new or an empty folder")
        return None
    record, question = read_record(path), config.ablation
    before = {"name": record.name, "metric": record.metric, "overrides": record.overrides}
    now = {"name": question.name, "metric": question.metric, "overrides": config.overrides}
    for key, value in before.items():
        if value != now[key]:
            difference = f"{key} is {value} there, {now[key]} now"
            raise UserError(f"output_dir={path}: holds another ablation ({difference}); name another output_dir")
    return record


@contextlib.contextmanager
def lock_output_dir(path: Path) -> Iterator[None]:
    """Hold the folder while working in it. Raises UserError if another process does."""
    lock = filelock.FileLock(path / LOCK)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise UserError(f"output_dir={path}: another process is at work there") from None
    except OSError as error:
        raise UserError(f"output_dir={path}: cannot be written to ({error.strerror})") from error
    try:
        yield
    finally:
        lock.release()
