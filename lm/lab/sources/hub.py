"""Text from a data set on the Hugging Face Hub, at one commit."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lm.config import DataConfig
from lm.data.paths import ENDINGS, extension
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

    def documents(self) -> Documents:
        return documents_of(_hub_cells(self.config, self.commit, self.key), self.config)


def _hub_commit(config: DataConfig, revision: str | None) -> str:
    """Return the commit of a revision, or the newest of the main branch. Raises UserError if it may not be read."""
    from huggingface_hub import HfApi

    api, name = HfApi(), str(config.path)
    with _hub_errors(config):
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
    with _hub_errors(config):
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
def _hub_errors(config: DataConfig) -> Iterator[None]:
    """Turn what the library raises into a line with its words, which tell what to do about access and names."""
    advice = ""
    if os.path.isdir(str(config.path)):
        advice = f"; data=parquet, json, csv or text reads the files of the folder {config.path} on this machine"
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        raise UserError(f"data.path={config.path}: {type(error).__name__}: {words}{advice}") from error
