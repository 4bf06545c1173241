"""Text from every source becomes the same documents at any location, and errors name what cannot be read."""

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config import BadInput, DataConfig, TokenizerConfig
from lm.data.corpus import check_paths, content_hash, load_documents, split
from lm.data.documents import Document


@pytest.fixture
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The `datasets` library caches in a folder of the test, and may use the network."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", cache / "downloads")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "served").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "served"))) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def load(source: str, path: object, column: str = "text") -> list[tuple[str, str]]:
    found = load_documents(DataConfig(source=source, path=str(path), column=column))
    return [(document.name, document.text) for document in found]


def refusal(source: str, path: object, column: str = "text") -> str:
    with pytest.raises(BadInput) as caught:
        load(source, path, column)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_folder(root: Path) -> Path:
    (root / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/z.txt", "deep/er/y.md", "c[1].txt", "c1.txt"):
        (root / name).write_text(f"text of {name}\r\n")
    return root


@given(text=st.text(min_size=2), fraction=st.floats(0.01, 0.99))
@settings(deadline=None)
def test_a_single_text_is_split_by_characters(text: str, fraction: float) -> None:
    (train,), (val,) = split([Document("one", text)], fraction)
    assert train + val == text
    assert len(train) == int(len(text) * (1 - fraction))


@given(st.lists(st.text(), min_size=2, max_size=40, unique=True), st.floats(0.01, 0.99))
@settings(deadline=None)
def test_several_documents_are_split_whole_and_no_side_is_empty(names: list[str], fraction: float) -> None:
    train, val = split([Document(name, name) for name in names], fraction)
    assert train
    assert val
    assert sorted(train + val) == sorted(names)
    assert train == [name for name in names if name in train]  # in the order given


def test_the_side_of_a_document_does_not_depend_on_other_documents() -> None:
    everything = [Document(f"file{i}.py", f"text {i}") for i in range(2000)]
    train, val = split(everything, 0.1)
    assert 150 < len(val) < 250
    for part in (everything[:500], everything[::3], everything[::-1]):
        some_train, some_val = split(part, 0.1)
        assert set(some_train) < set(train) or set(some_train) == set(train)
        assert set(some_val) <= set(val)


def test_the_standard_library_is_a_large_text_without_tests() -> None:
    documents = load_documents(DataConfig())
    names = [document.name for document in documents]
    assert sum(len(document.text) for document in documents) > 1_000_000
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert all(name.endswith(".py") and not Path(name).is_absolute() for name in names)
    assert not {"test", "tests", "site-packages"} & {part for name in names for part in Path(name).parts}
    assert not any(os.path.expanduser("~/") in document.text for document in documents)


def test_file_folder_and_glob_give_named_documents_in_order(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "texts")
    names = ["a.txt", "b.txt", "c1.txt", "c[1].txt", "deep/er/y.md", "deep/z.txt"]
    assert load("text", root / "a.txt") == [("a.txt", "text of a.txt\r\n")]
    assert load("text", root) == [(name, f"text of {name}\r\n") for name in names]
    assert [name for name, _ in load("text", root / "*.txt")] == names[:4]
    assert [name for name, _ in load("text", root / "**" / "*.txt")] == [*names[:4], "deep/z.txt"]
    assert [name for name, _ in load("text", root / "?.txt")] == ["a.txt", "b.txt"]
    assert [name for name, _ in load("text", root / "d*" / "e*" / "*")] == ["deep/er/y.md"]
    assert load("text", root / "c[1].txt") == [
        ("c[1].txt", "text of c[1].txt\r\n")
    ]  # an existing file takes precedence over a glob


def test_document_names_do_not_depend_on_the_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = write_folder(tmp_path / "here"), write_folder(tmp_path / "far" / "away [2]")
    assert load("text", here) == load("text", there)
    monkeypatch.chdir(here)
    assert load("text", ".") == load("text", here) == load("text", f"../{here.name}")
    assert load("text", "**/*.txt") == load("text", here / "**" / "*.txt")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("absent.txt", "no such file, folder or glob"),
        ("*.rst", "no such file, folder or glob"),
        ("empty_folder", "a folder without files"),
        ("empty.txt", "the text is empty"),
    ],
)
def test_absent_or_empty_text_is_named(path: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "empty.txt").touch()
    assert refusal("text", tmp_path / path) == f"data.path={tmp_path / path}: {why}"


def test_whitespace_is_text_and_empty_files_of_a_folder_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "space.txt").write_text(" \n\t")
    (tmp_path / "empty.txt").touch()
    assert load("text", tmp_path) == [("space.txt", " \n\t")]


def test_a_file_that_is_not_utf8_is_named_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("é")
    (tmp_path / "latin.txt").write_bytes("é and ".encode() + "é".encode("latin-1") + b"...")
    for path in (tmp_path / "latin.txt", tmp_path):
        assert refusal("text", path).startswith(f"{tmp_path / 'latin.txt'}: not UTF-8 at byte 7 ")


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), min_size=1, max_size=4), st.data())
@settings(deadline=None)
def test_the_content_hash_changes_with_any_name_and_any_text(pairs: list[tuple[str, str]], data: st.DataObject) -> None:
    other = data.draw(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), min_size=1, max_size=4))
    same = content_hash([Document(*one) for one in pairs]) == content_hash([Document(*one) for one in other])
    assert same == (pairs == other)
    name, text = pairs[-1]
    moved = [*pairs[:-1], (name + text[:1], text[1:])]  # a character moves from the text to the name
    assert not text or content_hash([Document(*one) for one in moved]) != content_hash([Document(*p) for p in pairs])


def write_table(kind: str, folder: Path) -> Path:
    """The texts "a" and "b\\n", with a number each."""
    path = folder / f"t.{kind}"
    match kind:
        case "json":
            path.write_text('{"text": "a", "n": 1}\n{"text": "b\\n", "n": 2}\n')
        case "csv":
            path.write_text('text,n\na,1\n"b\n",2\n')
        case "parquet":
            pa.parquet.write_table(pa.table({"text": ["a", "b\n"], "n": [1, 2]}), path)
    return path


@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_each_row_of_the_named_column_is_a_document(kind: str, tmp_path: Path) -> None:
    path = write_table(kind, tmp_path)
    rows = [("row 0", "a"), ("row 1", "b\n")]
    assert load(kind, path) == load(kind, tmp_path) == load(kind, tmp_path / "*.*") == rows
    assert refusal(kind, path, "txet") == "data.column=txet: the columns are text, n"
    assert refusal(kind, path, "n") == "data.column=n: row 0 holds 1, not a string"
    (tmp_path / "empty").mkdir()
    assert refusal(kind, tmp_path / "empty").startswith(f"data.path={tmp_path / 'empty'}: a folder without .{kind}")


@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe"])
@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_a_damaged_table_is_named(kind: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"t.{kind}"
    path.write_bytes(content)
    assert str(path) in refusal(kind, path)


@pytest.mark.usefixtures("own_home")
def test_a_url_is_read_like_a_file(server: str, tmp_path: Path) -> None:
    (tmp_path / "served" / "some.txt").write_text("served é\r\n", newline="")
    write_table("json", tmp_path / "served")
    assert load("text", f"{server}/some.txt") == [("some.txt", "served é\r\n")]
    assert load("json", f"{server}/t.json") == [("row 0", "a"), ("row 1", "b\n")]


@pytest.mark.usefixtures("own_home")
def test_a_dead_url_is_named_at_once(server: str) -> None:
    start = time.monotonic()
    for url in (f"{server}/absent.txt", "http://127.0.0.1:9/some.txt", "http://name.invalid/some.txt", "https:///"):
        assert refusal("text", url).startswith(f"data.path={url}: could not be downloaded (")
        assert f"data.path={url}: " in refusal("json", url)
    assert time.monotonic() - start < 10


def test_a_hub_data_set_without_a_network_is_refused_by_name() -> None:
    assert refusal("hub", "nobody/nothing").startswith("data.path=nobody/nothing: ")


@pytest.mark.usefixtures("own_home")
def test_glob_characters_in_the_name_of_an_existing_file_are_literal(tmp_path: Path) -> None:
    (tmp_path / "t1.jsonl").write_text('{"text": "another"}\n')
    (tmp_path / "t[1].jsonl").write_text('{"text": "this"}\n')
    assert load("json", tmp_path / "t[1].jsonl") == [("row 0", "this")]


@pytest.mark.parametrize("path", ["x" * 300, "~nobody_of_this_name/x"])
def test_an_impossible_path_is_named(path: str) -> None:
    assert refusal("text", path).startswith(f"data.path={path}: ")


def test_a_glob_gives_each_file_once(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "texts")
    assert [name for name, _ in load("text", root / "**" / "**" / "z.txt")] == ["deep/z.txt"]


def test_a_text_with_another_hash_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("ähm\r\n")
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    config = DataConfig(source="text", path=str(path), sha256=right.upper())
    assert [document.text for document in load_documents(config)] == ["ähm\r\n"]
    path.write_text("ahm\r\n")
    with pytest.raises(BadInput, match=f"expected one file of data.sha256={right.upper()}"):
        load_documents(config)
    (tmp_path / "b.txt").write_text("another")
    with pytest.raises(BadInput, match="is 2 files, expected one"):
        load_documents(replace(config, path=str(tmp_path)))
    with pytest.raises(BadInput, match=r"data\.sha256=x: is for data=text"):
        DataConfig(sha256="x")


@pytest.mark.parametrize(
    ("source", "path"),
    [("text", "http://127.0.0.1:9/x.txt"), ("json", "https://127.0.0.1:9/x"), ("hub", "owner/name"), ("stdlib", None)],
)
def test_only_local_paths_are_checked(source: str, path: str | None) -> None:
    check_paths(DataConfig(source=source, path=path), TokenizerConfig())


@pytest.mark.parametrize("source", ["text", "json", "csv", "parquet"])
def test_a_missing_local_path_is_named(source: str, tmp_path: Path) -> None:
    config = DataConfig(source=source, path=str(tmp_path / "*.jsonl"))
    with pytest.raises(BadInput, match=r"^data\.path=.*: no such file, folder or glob"):
        check_paths(config, TokenizerConfig())
    for suffix in ("jsonl", "csv", "parquet"):
        (tmp_path / f"a.{suffix}").touch()
    check_paths(replace(config, path=str(tmp_path)), TokenizerConfig())


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    tokenizer = TokenizerConfig(kind="file", vocab_size=None, path=str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadInput, match=r"^tokenizer\.path=.*json: no such file; expected a tokenizer\.json"):
        check_paths(DataConfig(), tokenizer)
    (tmp_path / "tokenizer.json").touch()
    check_paths(DataConfig(), tokenizer)
