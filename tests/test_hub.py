"""Data sets of the Hub, read from a server in this process that answers as the Hub does, and published splits."""

import itertools
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import datasets
import huggingface_hub.constants
import huggingface_hub.utils._http
import pytest
import yaml

from lm.config import DataConfig
from lm.data.sources import open_source
from lm.data.tokens import prepare
from lm.lab.sources import addresses
from lm.training.run_directory import RunDirectory
from tests.helpers import hub
from tests.helpers.refusals import refused
from tests.helpers.texts import BYTE, documents, write_rows

CARD = b"""---
configs:
- {config_name: small, data_files: [{split: train, path: small/train-*}, {split: validation, path: small/val-*}]}
- {config_name: large, data_files: [{split: train, path: large/*}]}
---
"""
STORIES = {
    "README.md": CARD,
    "small/train-00000-of-00002.parquet": hub.shard([f"story {i}\n" for i in range(300)], score=list(range(300))),
    "small/train-00001-of-00002.parquet": hub.shard([f"story {i}\n" for i in range(300, 400)], score=[0] * 100),
    "small/val-00000-of-00001.parquet": hub.shard([f"other {i}" for i in range(20)], score=[0] * 20),
    "large/a.parquet": hub.shard(
        [f"{i} " * 3000 for i in range(400)], rows=20, url=[f"{i:05}" * 3000 for i in range(400)]
    ),
}
TRAIN, VAL = [f"story {i}\n" for i in range(400)], [f"other {i}" for i in range(20)]


@pytest.fixture
def server(monkeypatch, tmp_path):
    with hub.serve() as running:
        for module in datasets.config, huggingface_hub.constants:
            monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", running.address)
        monkeypatch.setattr(datasets.config, "S3_DATASETS_BUCKET_PREFIX", f"{running.address}/count")
        monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
        template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE
        template = template.replace(huggingface_hub.constants.ENDPOINT, running.address)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        running.commit("owner/stories", STORIES)
        yield running


@pytest.fixture
def waits(monkeypatch):
    """The libraries do not wait before they try again."""
    for module in huggingface_hub.utils._http, datasets.utils.file_utils:
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))


def stories(tmp_path, **settings):
    given = {"source": "hub", "path": "owner/stories", "name": "small", "cache_dir": str(tmp_path / "cache")}
    return DataConfig(**(given | settings))


def read(config):
    rows = open_source(config).documents()
    return [text.decode() for _, blocks in rows if (text := b"".join(blocks))]


@pytest.mark.slow
def test_configuration_revision_and_split_are_read(server, tmp_path, monkeypatch):
    (tmp_path / "owner/stories").mkdir(parents=True)
    (tmp_path / "owner/stories/train.txt").write_text("a local folder of the same name\n")
    monkeypatch.chdir(tmp_path)
    first, config = server.commit("owner/stories", STORIES), stories(tmp_path)
    assert read(config) == TRAIN
    server.commit("owner/stories", STORIES | {"small/train-00001-of-00002.parquet": hub.shard(["new"])})
    server.branches["owner/stories", "v1"] = first
    assert read(config)[300:] == read(replace(config, revision="main"))[300:] == ["new"]
    assert read(replace(config, revision=first)) == read(replace(config, revision="v1")) == TRAIN
    assert not [request for request in server.asked if "/count/" in request], "nobody counts who reads"


def test_only_wanted_rows_and_columns_are_downloaded(server, tmp_path, monkeypatch):
    monkeypatch.setattr(addresses, "RANGE", 1 << 16)
    rows = itertools.islice(open_source(stories(tmp_path, name="large")).documents(), 30)
    assert [b"".join(blocks).decode() for _, blocks in rows] == [f"{i} " * 3000 for i in range(30)]
    assert server.sent["large/a.parquet"] < len(STORIES["large/a.parquet"]) / 6


def test_files_of_other_kinds_are_read_too(server, tmp_path):
    lines = [json.dumps({"text": f'row "{i}"\n', "n": i}) for i in range(30)]
    server.commit("owner/lines", {"train.jsonl": "\n".join(lines).encode()})
    server.commit("owner/texts", {"train.txt": b"one\ntwo\n"})
    config = stories(tmp_path, path="owner/lines", name=None)
    assert read(config) == [f'row "{i}"\n' for i in range(30)]
    assert read(replace(config, path="owner/texts")) == ["one", "two"]


ABSENT = [  # settings, and what their one line of error says
    ({"name": "smal"}, r"data\.name=smal: .*'small', 'large'.*"),
    ({"name": None}, r"data\.name=None: .*'small', 'large'.*"),
    ({"split": "test"}, r"data\.split=test: .* train, validation"),
    ({"val_split": "val"}, r"data\.val_split=val: .* train, validation"),
    ({"column": "story"}, r"hf://.*\.parquet: data\.column=story: .* text, score"),
    ({"column": "score"}, r"data\.column=score: row 0 .*"),
    ({"revision": "v2"}, r"data\.path=owner/stories: RevisionNotFoundError: .*/v2\. .*"),
    ({"path": "owner/x"}, r"data\.path=owner/x: RepositoryNotFoundError: .*"),
    ({"path": "a/b/c"}, r"data\.path=a/b/c: .*"),
    ({"path": "owner/empty", "name": None}, r"data\.path=owner/empty: .*"),
    ({"path": "owner/gated"}, r"data\.path=owner/gated: GatedRepoError: .*"),
]


def test_what_there_is_not_is_one_line_before_the_text_is_read(server, tmp_path):
    server.commit("owner/gated", STORIES)
    server.commit("owner/empty", {"README.md": b"nothing"})
    server.gated.add("owner/gated")
    for settings, message in ABSENT:
        server.sent.clear()
        with refused(f"^{message}$"):
            prepare(stories(tmp_path, **settings), BYTE)
        assert "column" in settings or set(server.sent) <= {"README.md"}


# --- a server that is away


@pytest.mark.usefixtures("waits")
def test_a_server_that_stays_broken_is_one_line_and_leaves_nothing(server, tmp_path):
    config, shard = stories(tmp_path), "small/train-00001-of-00002.parquet"
    server.fault = lambda path: 503 if path.endswith(shard) else None
    with refused(r"^data\.path=owner/\w+: HfHubHTTPError: .*503"):
        prepare(config, BYTE)
    assert not list(tmp_path.glob("cache/tokens/*/*"))
    server.fault = lambda path: None
    assert sum(map(len, documents(prepare(config, BYTE)))) == 400


@pytest.mark.usefixtures("waits")
def test_another_version_in_the_cache_of_the_library_is_not_taken(server, tmp_path):
    datasets.load_dataset("owner/stories", "small", cache_dir=str(datasets.config.HF_DATASETS_CACHE))
    server.commit("owner/stories", STORIES | {"small/train-00001-of-00002.parquet": hub.shard(["new"])})
    server.fault = lambda path: 503 if path.endswith("README.md") else None
    with refused(r"^data\.path=owner/stories: "):
        prepare(stories(tmp_path), BYTE)


def test_a_published_split_is_the_validation_text_and_the_tokens_of_a_commit_are_kept(server, tmp_path, monkeypatch):
    commit = server.commit("owner/stories", STORIES)
    branch, pinned = (stories(tmp_path, val_split="validation", revision=name) for name in (None, commit))
    data = prepare(branch, BYTE)
    assert (documents(data), data.revision) == ((TRAIN, VAL), commit)
    server.asked.clear()
    assert prepare(pinned, BYTE).hash == data.hash
    assert server.asked == []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for config in branch, replace(pinned, name="large", val_split=None), replace(branch, revision="v1"):
        with refused(r"^data\.path=owner/stories: .*OfflineModeIsEnabled"):
            prepare(config, BYTE)


# --- published validation texts


def test_a_validation_file_is_the_whole_validation_text(tmp_path):
    for name, text in ("a.txt", "training\n" * 3), ("b.txt", "more\n"), ("c.val", "validation\n"):
        (tmp_path / name).write_text(text)
    folder = str(tmp_path)
    config = DataConfig(source="text", path=f"{folder}/*.txt", val_path=f"{folder}/c.val", seq_len=8, cache_dir=folder)
    data, few = prepare(config, BYTE), prepare(replace(config, max_bytes=10), BYTE)
    assert documents(data) == (["training\ntraining\ntraining\n", "more\n"], ["validation\n"])
    assert (documents(few), few.val_bytes) == ((["training\nt"], ["validation\n"]), 11)
    with refused(rf"^data\.val_path=.*: {folder}/b\.txt belongs to data\.path=.* as well$"):
        prepare(replace(config, val_path=f"{folder}/b.txt"), BYTE)


def test_rows_may_be_the_lines_of_one_text(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", ["", " = Title = \n", "", " A line .", " Another \n"])
    config = DataConfig(source="json", path=str(path), seq_len=1, val_fraction=0.5, cache_dir=str(tmp_path))
    lines = prepare(replace(config, rows="lines"), BYTE)
    assert documents(lines) == ([" = Title = \n A l"], ["ine .\n Another \n"])
    assert lines.hash != prepare(config, BYTE).hash


def test_the_word_of_a_run_downloads_no_text(server, tmp_path):
    commit = server.commit("owner/stories", STORIES)
    (tmp_path / "a.txt").write_text("a text")
    for data, revision, line in (
        (
            DataConfig(source="text", path="a.txt", val_path="https://host/b.txt"),
            None,
            r"data\.val_path=https://host/b\.txt: is not in .*/downloads",
        ),
        (stories(tmp_path), None, "comes from owner/stories, of no commit"),
        (stories(tmp_path), commit, "data.path=owner/stories: its tokens are not in "),
    ):
        settings = {"data": asdict(data), "data_revision": revision, "tokenizer": asdict(BYTE)}
        settings |= {"data_hash": "", "tokenizer_hash": "", "started_in": ".", "code": {}, "requested": {}}
        (tmp_path / "config.yaml").write_text(f"config_hash: x\n{yaml.safe_dump(settings)}")
        with refused(f"{line}.*; give a text: data=text data.path=FILE$"):
            RunDirectory(tmp_path).read_text()
    assert server.asked == []
