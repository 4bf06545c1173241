"""What servers say of files, and data sets of the Hugging Face Hub. Without an answer, the last one is used."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lm.config import DataConfig, UserError
from lm.data.paths import SUFFIXES, suffix
from lm.data.tables import READERS, TIMEOUT, cells_of, filesystem_of, first_line
from lm.system.files import json_sha256, read_json, write_json

log = logging.getLogger(__name__)


def ask(cache: Path, request: str, answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a server says; without an answer, what it said the last time, with a warning. Raises UserError."""
    note = cache / "servers" / f"{json_sha256(request)[:32]}.json"
    try:
        reply = answer()
    except UserError as error:
        try:
            reply = read_json(note)
        except (OSError, ValueError):
            raise error from None
        log.warning("%s; the version of the last time is used: %s", error, ", ".join(map(str, reply.values())))
        return reply
    with suppress(OSError):  # a cache that is read-only still serves
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, reply)
    return reply


def file_version(place: str, url: str) -> dict[str, Any]:
    """What a server says of a file without sending it, as far as it is the same until the file changes."""
    try:
        filesystem, path = filesystem_of(url)
        info = filesystem.info(path)
    except Exception as error:
        status = getattr(error.__cause__ or error, "status", None)
        reason = f"status {status}" if status else first_line(error.__cause__ or error)
        raise UserError(f"{place}: could not be read ({reason})") from error
    return {key: str(value) for key, value in sorted(info.items()) if key not in ("url", "name", "mimetype")}


def hub_commit(config: DataConfig, revision: str | None) -> dict[str, Any]:
    """The commit of a revision, or the newest of the main branch, if it may be read."""
    from huggingface_hub import HfApi

    api, name = HfApi(), str(config.path)
    with _hub_errors(config, revision):
        info = api.dataset_info(name, revision=revision, timeout=TIMEOUT)
        if info.gated:
            api.auth_check(name, repo_type="dataset")
    return {"commit": str(info.sha)}


def hub_cells(config: DataConfig, commit: str, key: str) -> Iterator[Any]:
    """The cells of a column of a split, whose setting is `key`. What is not read is not downloaded.

    A read that fails is tried again by the library for a while, from where it stopped.
    """
    import datasets

    hub_commit(config, commit)
    with _hub_errors(config, commit):
        path = f"hf://datasets/{config.path}"  # without the prefix, a local folder of this name would be read
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it would tell a further server of each reading
        try:
            builder = datasets.load_dataset_builder(path, config.name, revision=commit)
        except ValueError as error:  # its text lists the configurations
            raise UserError(f"data.name={config.name}: {' '.join(str(error).split())}") from error
        if builder.hash != commit:  # without an answer, the library takes any version that it finds in its own cache
            raise ConnectionError("its files cannot be listed")
        splits = builder.config.data_files or {}
        if config.split not in splits:
            raise UserError(f"{key}={config.split}: the splits of {config.path} are {', '.join(splits)}")
        files = [str(file) for file in splits[config.split]]
        kinds = {file: kind for file in files for kind in READERS if suffix(file) in SUFFIXES[kind]}
        if len(kinds) == len(files):
            for file, kind in kinds.items():
                yield from READERS[kind](file, config.column)
        else:  # of another kind, which the library reads
            yield from cells_of(builder.as_streaming_dataset(config.split), config.column)


@contextmanager
def _hub_errors(config: DataConfig, revision: str | None) -> Iterator[None]:
    from huggingface_hub import constants, errors

    place, page = f"data.path={config.path}", f"{constants.ENDPOINT}/datasets/{config.path}"
    login = "log in by `hf auth login` or set HF_TOKEN"
    try:
        yield
    except UserError:
        raise
    except errors.GatedRepoError as error:  # a RepositoryNotFoundError too
        raise UserError(f"{place}: its owner grants access on request; ask for it at {page}, then {login}") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{place}: no such data set on the Hub; if it is a private one, {login}") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"data.revision={revision}: no such branch, tag or commit of {config.path}") from error
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"answers with status {status}" if status else f"cannot be read ({first_line(error)})"
        raise UserError(f"{place}: {constants.ENDPOINT} {reason}") from error
