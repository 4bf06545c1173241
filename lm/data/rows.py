"""Documents from a column of JSON, CSV and Parquet files and of the Hub, through the `datasets` library."""

import glob
import os
from typing import Any

from lm.config import BadInput, DataConfig
from lm.data.documents import Document, first_line, is_url, local_files

HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
SUFFIXES = {"json": (".json", ".jsonl"), "csv": (".csv",), "parquet": (".parquet",)}


def table_documents(config: DataConfig) -> list[Document]:
    """A document for each row of data.column, from local files, a URL or a data set of the Hub. Raises BadInput."""
    assert config.path is not None
    hub, url = config.source == "hub", is_url(config.path)
    files = [] if hub or url else local_files(config.path, SUFFIXES[config.source])[1]
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        if hub:
            rows = from_hub(config)
        else:
            names = [glob.escape(str(file)) for file in files] or config.path
            rows = datasets.load_dataset(config.source, data_files=names, split="train")
    except BadInput as error:
        raise BadInput(f"data.path={config.path}: {error}") from error
    except Exception as error:
        reason = first_line(error.__cause__ or error)
        raise BadInput(f"data.path={config.path}: cannot be read as {config.source} ({reason})") from error
    if config.column not in rows.column_names:
        raise BadInput(f"data.column={config.column}: the columns are {', '.join(rows.column_names)}")
    column = rows[config.column]
    wrong = next((i for i, one in enumerate(column) if not isinstance(one, str)), None)
    if wrong is not None:
        raise BadInput(f"data.column={config.column}: row {wrong} holds {column[wrong]!r}, not a string")
    return [Document(f"row {i}", one) for i, one in enumerate(column)]


def from_hub(config: DataConfig) -> Any:
    """A data set of the Hub; without a network, from the cache or else BadInput at once, without five retries."""
    import datasets
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
