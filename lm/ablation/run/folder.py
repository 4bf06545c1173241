"""The folder of an ablation: whose it is, and who is at work in it."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from lm.config import BadInput
from lm.config.ablation import AblateConfig, AblationConfig
from lm.system.files import remove_partial

LOCK = ".lock"


def default_dir(config: AblateConfig) -> Path:
    """ablations/ and the name; other overrides make another folder."""
    words = json.dumps(config.overrides)
    suffix = f"-{hashlib.sha256(words.encode()).hexdigest()[:8]}" if config.overrides else ""
    return Path("ablations") / f"{config.ablation.name}{suffix}"


def read_record(path: Path, ablation: AblationConfig, overrides: list[str]) -> dict[str, Any]:
    """What an earlier call has left in the folder, if any. Raises BadInput if that was not this ablation."""
    try:
        there = json.loads((path / "ablation.json").read_text())
    except FileNotFoundError:
        if path.exists() and (not path.is_dir() or any(one.name != LOCK for one in path.iterdir())):
            raise BadInput(f"output_dir={path}: holds no ablation; name a new or an empty folder") from None
        return {}
    except (OSError, ValueError) as error:
        raise BadInput(f"{path / 'ablation.json'}: cannot be read ({error})") from error
    if not isinstance(there, dict):
        raise BadInput(f"{path / 'ablation.json'}: not what ablate.py wrote")
    here = {"name": ablation.name, "overrides": overrides, "metric": ablation.metric}
    for key, value in here.items():
        if there.get(key) != value:
            found = f"{key} is {there.get(key)} there, {value} now"
            raise BadInput(f"output_dir={path}: holds another ablation ({found}); name another output_dir")
    return there


@contextlib.contextmanager
def claim(path: Path) -> Iterator[None]:
    """Hold the folder while working in it. Raises BadInput if another process does.

    A folder made here in which nothing was begun is taken away.
    """
    lock = filelock.FileLock(path / LOCK)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise BadInput(f"output_dir={path}: another process is at work there") from None
    except OSError as error:
        raise BadInput(f"output_dir={path}: cannot be written to ({error.strerror})") from error
    try:
        remove_partial(path)
        yield
    finally:
        if not (path / "ablation.json").exists():
            (path / LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody else's files are in it
                for folder in made:
                    folder.rmdir()
        lock.release()
