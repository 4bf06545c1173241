"""Documents from a data set of the Hugging Face Hub, as a stream: what is not read is not downloaded."""

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from lm.config import DataConfig, UserError
from lm.data.documents import Document, Fingerprint, first_line
from lm.data.rows import ROWS, column_documents, parquet_batches, quiet_datasets
from lm.system.files import json_sha256, read_json, write_json

TIMEOUT = 10.0  # seconds, to the first answer
BLOCK = 1 << 22  # bytes of a file that are asked for at a time
LOGIN = "log in by `hf auth login` or set HF_TOKEN"

log = logging.getLogger(__name__)


class Unavailable(UserError):
    """The Hub does not answer, or not now."""


class Hub:
    """A document from each row of a column of a split, at one commit. Raises UserError."""

    def __init__(self, config: DataConfig) -> None:
        self.config, self.commit = config, resolve(config)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.commit)

    @cached_property
    def builder(self) -> Any:
        ask(self.config, self.commit)
        return build(self.config, self.commit)

    @property
    def size(self) -> int | None:
        known = (self.builder.info.splits or {}).get(self.config.split)
        return known.num_bytes if known else None

    def documents(self) -> Iterator[Document]:
        """Read as they are asked for. What fails is tried again for half a minute from where it stopped, and the
        library says so on standard error; Ctrl-C comes through at any time.
        """
        files = self.builder.config.data_files or {}
        if self.config.split not in files:
            raise UserError(f"data.split={self.config.split}: the splits of {self.config.path} are {', '.join(files)}")
        try:
            yield from column_documents(
                self.batches([str(name) for name in files[self.config.split]]), self.config.column
            )
        except UserError:
            raise
        except Exception as error:
            raise unavailable(self.config, error) from error

    def batches(self, files: list[str]) -> Iterator[Any]:
        from huggingface_hub import HfFileSystem

        if all(name.endswith(".parquet") for name in files):
            opened = (HfFileSystem().open(name, block_size=BLOCK) for name in files)
            return parquet_batches(opened, self.config.column)
        return self.builder.as_streaming_dataset(self.config.split).with_format("arrow").iter(ROWS)


def resolve(config: DataConfig) -> str:
    """The commit that data.revision stands for; without an answer from the Hub, what it stood for the last time.

    A whole commit hash stands for itself, and the Hub is not asked.
    """
    if re.fullmatch("[0-9a-f]{40}", config.revision or ""):
        return str(config.revision)
    request = {"path": config.path, "revision": config.revision or "main"}
    note = Path(config.cache_dir).expanduser() / "revisions" / f"{json_sha256(request)[:32]}.json"
    try:
        commit = ask(config, config.revision)
    except Unavailable as error:
        try:
            known = read_json(note)
        except (OSError, ValueError):
            raise error from None
        log.warning("%s; it is read at commit %s, the newest one known", error, known["commit"])
        return str(known["commit"])
    with suppress(OSError):  # a cache that is read-only still serves
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, {**request, "commit": commit})
    return commit


def ask(config: DataConfig, revision: str | None) -> str:
    """The commit of a revision, from the Hub. Raises UserError if there is none or it may not be read."""
    from huggingface_hub import HfApi, constants, errors

    api, name, place = HfApi(), str(config.path), f"data.path={config.path}"
    try:
        found = api.dataset_info(name, revision=revision, timeout=TIMEOUT)
        if found.gated:
            api.auth_check(name, repo_type="dataset")
    except errors.GatedRepoError as error:
        page = f"{constants.ENDPOINT}/datasets/{name}"
        raise UserError(f"{place}: its owner grants access on request; ask for it at {page}, then {LOGIN}") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{place}: no such data set on the Hub; if it is a private one, {LOGIN}") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"data.revision={revision}: {name} has no such branch, tag or commit") from error
    except errors.HFValidationError as error:
        raise UserError(f"{place}: expected OWNER/NAME, the name of a data set on the Hub") from error
    except Exception as error:
        raise unavailable(config, error) from error
    return str(found.sha)


def unavailable(config: DataConfig, error: Exception) -> Unavailable:
    from huggingface_hub import constants

    status = getattr(getattr(error, "response", None), "status_code", None)
    what = f"answers with status {status}" if status else f"cannot be read ({first_line(error)})"
    return Unavailable(f"data.path={config.path}: {constants.ENDPOINT} {what}")


def build(config: DataConfig, commit: str) -> Any:
    """The `datasets` builder of a configuration, which knows the files of each split."""
    datasets = quiet_datasets()
    datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 1  # beside the Hub's own
    path = f"hf://datasets/{config.path}"  # without the prefix, a local folder of this name would be read
    names: list[str] = []
    reason: Exception
    try:
        builder = datasets.load_dataset_builder(path, config.name, revision=commit)
        if builder.hash != commit:  # without an answer, the library takes any version that it finds in its own cache
            raise ConnectionError("its files cannot be listed")
        return builder
    except ValueError as error:
        reason = error
        with suppress(Exception):  # the reason stays
            names = datasets.get_dataset_config_names(path, revision=commit)
    except Exception as error:
        reason = error
    what = f"the configurations of {config.path} are {', '.join(names)}"
    if config.name is None and len(names) > 1:
        raise UserError(f"data.name: none is given; {what}") from reason
    if names and config.name not in (None, *names):
        raise UserError(f"data.name={config.name}: {what}") from reason
    raise UserError(f"data.path={config.path}: cannot be read as a data set ({first_line(reason)})") from reason
