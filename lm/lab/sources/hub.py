"""Text from a data set on the Hugging Face Hub, at one commit."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lm.config import DataConfig
from lm.data.paths import ENDINGS, extension, named
from lm.data.sources import COMMIT, Documents
from lm.errors import UserError, error_prefix
from lm.lab.sources.addresses import TIMEOUT
from lm.lab.sources.tables import READERS, cells_in, cells_of, documents_of
from lm.system.files import json_sha256


class Hub:
    """A document from each row of a column of a split, at one commit of a data set on the Hugging Face Hub."""

    def __init__(self, config: DataConfig, key: str) -> None:
        self.config, self.key, self.place, self.commit = config, key, f"data.path={config.path}", str(config.revision)
        if not COMMIT.fullmatch(self.commit):  # a whole commit hash stands for itself
            self.commit = _hub_commit(config, config.revision)

    def state(self) -> str:
        return json_sha256([self.config.path, self.config.name, self.config.split, self.commit])

    def documents(self, max_bytes: int | None) -> Documents:
        return documents_of(_hub_cells(self.config, self.commit, self.key), self.config)


def _hub_commit(config: DataConfig, revision: str | None) -> str:
    """Return the commit of a revision, or the newest of the main branch. Raises UserError if it may not be read."""
    from huggingface_hub import HfApi

    api, name = HfApi(), str(config.path)
    with _hub_errors(config, revision):
        info = api.dataset_info(name, revision=revision, timeout=TIMEOUT)
        if info.gated:
            api.auth_check(name, repo_type="dataset")
    return str(info.sha)


def _hub_cells(config: DataConfig, commit: str, key: str) -> Iterator[Any]:
    """Yield the cells of a column of a split, whose setting is `key`. What is not read is not downloaded.

    A read that fails is tried again by the library for a while, from where it stopped.
    """
    import datasets

    _hub_commit(config, commit)
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
        kinds = {file: kind for file in files for kind in READERS if extension(file) in ENDINGS[kind]}
        if len(kinds) == len(files):
            for file, kind in kinds.items():
                with error_prefix(file):
                    yield from cells_in(file, kind, config.column)
        else:  # of another kind, which the library reads
            yield from cells_of(builder.as_streaming_dataset(config.split), config.column)


@contextmanager
def _hub_errors(config: DataConfig, revision: str | None) -> Iterator[None]:
    from huggingface_hub import constants, errors

    place, page = f"data.path={config.path}", f"{constants.ENDPOINT}/datasets/{config.path}"
    advice = ""
    if os.path.isdir(str(config.path)):
        advice = f"; data=parquet, json, csv or text reads the files of the folder {config.path} on this machine"
    login = "log in by `hf auth login` or set HF_TOKEN"
    try:
        yield
    except UserError:
        raise
    except errors.GatedRepoError as error:  # a RepositoryNotFoundError too
        raise UserError(f"{place}: its owner grants access on request; ask for it at {page}, then {login}") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{place}: no such data set on the Hub; if it is a private one, {login}{advice}") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"data.revision={revision}: no such branch, tag or commit of {config.path}") from error
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"answers with status {status}" if status else f"cannot be read ({named(error)})"
        raise UserError(f"{place}: {constants.ENDPOINT} {reason}{advice}") from error
