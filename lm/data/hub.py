"""Documents from a data set of the Hugging Face Hub."""

import os
from collections.abc import Iterator
from typing import Any

from lm.config import BadInput, DataConfig
from lm.data.documents import Document, Fingerprint, first_line
from lm.data.rows import column_documents, quiet_datasets

HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co")


class Hub:
    """A document from each row of a column of a data set."""

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.size: int | None = None
        try:
            self.rows = from_hub(config)
        except BadInput as error:
            raise BadInput(f"data.path={config.path}: {error}") from error
        except Exception as error:
            reason = first_line(error.__cause__ or error)
            raise BadInput(f"data.path={config.path}: cannot be read as hub ({reason})") from error

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.rows._fingerprint)

    def documents(self) -> Iterator[Document]:
        return column_documents(self.rows, self.config.column)


def from_hub(config: DataConfig) -> Any:
    """A data set of the Hub; without a network, from the cache or else BadInput at once, without five retries."""
    datasets = quiet_datasets()
    import huggingface_hub.constants

    if reachable(HUB):
        return datasets.load_dataset(config.path, split=config.split)
    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(config.path, split=config.split)
    except Exception as error:
        raise BadInput(f"{HUB} cannot be reached, and the data set is not cached; give local files instead") from error
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before


def reachable(address: str) -> bool:
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
