"""Text from every source becomes the same documents at any location, and errors name what cannot be read."""

import hashlib
import itertools
import os
import tempfile
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
from conftest import Listed, as_nobody, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config import DataConfig, TokenizerConfig, UserError
from lm.data.corpus import SOURCES, stored_text
from lm.data.documents import Document
from lm.data.paths import check_paths
from lm.data.split import Part, Shared, split
from lm.data.store import limited, scan


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


def documents(config: DataConfig) -> list[tuple[str, str]]:
    """The names and texts of what is read."""
    found = limited(SOURCES[config.source](config).documents(), config.max_bytes)
    return [(document.name, b"".join(document.blocks).decode()) for document in found]


def load(source: str, path: object, column: str = "text") -> list[tuple[str, str]]:
    return documents(DataConfig(source=source, path=str(path), column=column))


def refusal(source: str, path: object, column: str = "text") -> str:
    with tempfile.TemporaryDirectory() as cache, pytest.raises(UserError) as caught:
        stored_text(DataConfig(source=source, path=str(path), column=column, cache_dir=cache))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_folder(root: Path) -> Path:
    (root / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/z.txt", "deep/er/y.md", "c[1].txt", "c1.txt"):
        (root / name).write_text(f"text of {name}\r\n")
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def texts(part: Part) -> list[str]:
    """The texts of the documents of a part."""
    found, text = [], b""
    for block, last in part.blocks():
        text += block
        if last:
            found.append(text.decode())
            text = b""
    return found


@given(text=st.text(min_size=2), fraction=st.floats(0.01, 0.99), block=st.integers(2, 9))
@settings(deadline=None)
def test_a_single_text_is_split_by_characters(text: str, fraction: float, block: int, cache: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.data.split.BLOCK", block)
        train, val, _ = split(stored(cache, [("one", text)]), fraction, None)
        assert "".join(texts(train) + texts(val)) == text
        assert len("".join(texts(train))) == int(len(text) * (1 - fraction))


PAIRS = st.lists(st.tuples(st.text(max_size=5), st.text(min_size=1, max_size=5)), min_size=1, max_size=4)
NAMES = st.lists(st.text(), min_size=2, max_size=40, unique=True)


@given(names=NAMES, fraction=st.floats(0.01, 0.99))
@settings(deadline=None)
def test_several_documents_are_split_whole_and_no_side_is_empty(names: list[str], fraction: float, cache: Path) -> None:
    train, val, _ = split(stored(cache, [(name, f"text {name}") for name in names]), fraction, None)
    trained, held_out = ([one[5:] for one in texts(part)] for part in (train, val))
    assert trained
    assert held_out
    assert sorted(trained + held_out) == sorted(names)
    assert trained == [name for name in names if name in trained]  # in the order given


def test_the_side_of_a_document_does_not_depend_on_other_documents(cache: Path) -> None:
    def sides(pairs: list[tuple[str, str]]) -> tuple[set[str], set[str]]:
        train, val, _ = split(stored(cache, pairs), 0.1, None)
        return set(texts(train)), set(texts(val))

    everything = [(f"file{i}.py", f"text {i}") for i in range(2000)]
    train, val = sides(everything)
    assert 150 < len(val) < 250
    for part in (everything[:500], everything[::3], everything[::-1]):
        some_train, some_val = sides(part)
        assert some_train < train or some_train == train
        assert some_val <= val


@given(text=st.text(min_size=2), limit=st.integers(4, 30))
@settings(deadline=None)
def test_the_end_of_a_single_text_is_held_out_up_to_the_limit(text: str, limit: int, cache: Path) -> None:
    whole = stored(cache, [("one", text)])
    plain, limited = split(whole, 0.5, None), split(whole, 0.5, limit)
    held_out = "".join(texts(limited[1]))
    assert "".join(texts(limited[0])) + held_out == text
    if plain[1].n_bytes <= limit:
        assert limited == plain
    else:
        assert limited[2] != plain[2]
        assert limit - 4 < len(held_out.encode()) <= limit


@given(names=NAMES, limit=st.integers(4, 200))
@settings(deadline=None)
def test_the_documents_of_lowest_hash_that_fit_are_held_out(names: list[str], limit: int, cache: Path) -> None:
    pairs = [(name, "x" * (i % 7 + 1) + name) for i, name in enumerate(names)]
    whole = stored(cache, pairs)
    plain, limited = split(whole, 0.5, None), split(whole, 0.5, limit)
    if plain[1].n_bytes <= limit:
        assert limited == plain
        return
    ranked = sorted(pairs, key=lambda pair: hashlib.sha256(pair[0].encode()).digest()[:8])
    total = list(itertools.accumulate(len(text.encode()) for _, text in ranked))
    if not (fitting := sum(size <= limit for size in total)):
        whole_text, (held_out,) = ranked[0][1], texts(limited[1])
        assert whole_text.endswith(held_out)
        assert limit - 4 < len(held_out.encode()) <= limit
        left = [text if name != ranked[0][0] else text[: -len(held_out)] for name, text in pairs]
        assert texts(limited[0]) == left
        assert limited[2] != plain[2]
        assert Shared.between(*limited[:2]).n_documents == sum(text == whole_text for _, text in ranked[1:])
        return
    assert sorted(texts(limited[1])) == sorted(text for _, text in ranked[:fitting])
    assert sorted(texts(limited[0])) == sorted(text for _, text in ranked[fitting:])
    assert (limited[2] == plain[2]) == (len(texts(plain[1])) == fitting)


def test_texts_on_both_sides_are_counted(cache: Path) -> None:
    pairs = [(f"{i}", f"text {i % 150}") for i in range(200)]  # 50 texts stand twice
    train, val, _ = split(stored(cache, pairs), 0.3, None)
    both = [text for text in texts(val) if text in set(texts(train))]
    found = Shared.between(train, val)
    assert (found.n_documents, found.of) == (len(both), len(texts(val)))
    assert found.share == pytest.approx(len("".join(both)) / val.n_bytes)
    assert 0 < len(both) < len(texts(val))
    one = split(stored(cache, [("one", "some text")]), 0.5, None)
    assert Shared.between(*one[:2]).share == 0


def test_the_standard_library_is_a_large_text_without_tests() -> None:
    found = documents(DataConfig())
    names = [name for name, _ in found]
    assert sum(len(text) for _, text in found) > 1_000_000
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert all(name.endswith(".py") and not Path(name).is_absolute() for name in names)
    assert not {"test", "tests", "site-packages"} & {part for name in names for part in Path(name).parts}
    assert not any(os.path.expanduser("~/") in text for _, text in found)


def test_file_folder_and_glob_give_named_documents_in_order(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "texts")
    names = ["a.txt", "b.txt", "c1.txt", "c[1].txt", "deep/er/y.md", "deep/z.txt"]
    assert load("text", root / "a.txt") == [
        ("", "text of a.txt\r\n")
    ]  # the name of a single file is no part of its text
    assert load("text", root) == [(name, f"text of {name}\r\n") for name in names]
    assert [name for name, _ in load("text", root / "*.txt")] == names[:4]
    assert [name for name, _ in load("text", root / "**" / "*.txt")] == [*names[:4], "deep/z.txt"]
    assert [name for name, _ in load("text", root / "?.txt")] == ["a.txt", "b.txt"]
    assert [name for name, _ in load("text", root / "d*" / "e*" / "*")] == [""]
    assert load("text", root / "c[1].txt") == [
        ("", "text of c[1].txt\r\n")
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


@given(pairs=PAIRS, other=PAIRS)
@settings(deadline=None)
def test_the_content_hash_changes_with_any_name_and_any_text(
    pairs: list[tuple[str, str]], other: list[tuple[str, str]]
) -> None:
    assert (scan(Listed(pairs)).hash == scan(Listed(other)).hash) == (pairs == other)
    name, text = pairs[-1]
    if len(text) > 1:
        moved = [*pairs[:-1], (name + text[:1], text[1:])]  # a character moves from the text to the name
        assert scan(Listed(moved)).hash != scan(Listed(pairs)).hash


def test_the_content_hash_of_earlier_versions_is_kept() -> None:
    digest = hashlib.sha256()
    for part in ("é.txt", "text é", "b", "c\n"):
        digest.update(len(part.encode()).to_bytes(8, "big") + part.encode())
    assert scan(Listed([("é.txt", "text é"), ("empty", ""), ("b", "c\n")])).hash == digest.hexdigest()


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
def test_nobody_is_told_that_a_table_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *place, **_: asked.append(place))
    for name in ("datasets.config.HF_HUB_OFFLINE", "huggingface_hub.constants.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, False)
    load("json", write_table("json", tmp_path))
    assert asked == []


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())])
def test_text_in_every_encoding_of_arrow_is_read(kind: pa.DataType, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(pa.table({"text": pa.array(["a", "é", "a"]).cast(kind)}), path)
    assert load("parquet", path) == [("row 0", "a"), ("row 1", "é"), ("row 2", "a")]


def test_a_parquet_file_whose_text_is_not_utf_8_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    texts = pa.array([b"a", b"\xb5", None]).cast(pa.binary()).view(pa.string())
    pa.parquet.write_table(pa.table({"text": texts}), path)
    with pytest.raises(UserError, match=r"^data\.column=text: not UTF-8 in rows 0 to 2 \("):
        load("parquet", path)


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
    assert load("text", f"{server}/some.txt") == [("", "served é\r\n")]
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
    assert [name for name, _ in load("text", root / "**" / "**" / "z.txt")] == [""]


# --- links, closed folders, names


def linked(root: Path) -> Path:
    """A folder of three files, a file outside it, and links that lead in circles, twice to a file, and nowhere."""
    write_folder(root / "in")
    (root / "out").mkdir()
    (root / "out" / "o.txt").write_text("outside")
    for name, target in {
        "in/me": ".",
        "in/deep/up": "..",
        "in/deep/er/top": "../../..",
        "in/0.txt": "a.txt",
        "in/00": "deep",
        "in/outside.txt": "../out/o.txt",
        "in/again.txt": "../out/o.txt",
        "in/nowhere": "absent",
        "in/itself": "itself",
    }.items():
        (root / name).symlink_to(target)
    os.link(root / "in" / "b.txt", root / "in" / "hard.txt")
    return root / "in"


@pytest.mark.parametrize("pattern", [".", "**", "**/*", "**/**/*"])
def test_each_file_is_taken_once_however_many_links_lead_to_it(tmp_path: Path, pattern: str) -> None:
    found = [name for name, _ in load("text", linked(tmp_path / "root") / pattern)]
    names = ["a.txt", "b.txt", "c1.txt", "c[1].txt", "deep/er/y.md", "deep/z.txt"]
    outside = [name for name in found if name not in names]
    assert found == sorted(found, key=lambda name: Path(name).parts)
    assert [name for name in found if name in names] == names
    assert len(outside) == 1  # the file outside, under one of its names
    assert outside[0].endswith(("o.txt", "again.txt", "outside.txt"))


def test_a_glob_matches_links_by_their_own_names(tmp_path: Path) -> None:
    root = linked(tmp_path / "root")
    assert [name for name, _ in load("text", root / "0*" / "*.txt")] == [""]
    assert [name for name, _ in load("text", root / "0*")] == [""]


@pytest.mark.parametrize("closed", ["deep", "deep/er", "b.txt"])
def test_a_closed_folder_or_file_is_named(closed: str, open_folder: Path) -> None:
    root = write_folder(open_folder / "texts")
    config = DataConfig(source="text", path=str(root), cache_dir=str(open_folder / "cache"))
    (open_folder / "cache").mkdir(mode=0o777)
    (open_folder / "cache").chmod(0o777)
    (root / closed).chmod(0)
    with as_nobody(), pytest.raises(UserError, match=rf"{root / closed}: Permission denied"):
        stored_text(config)
    (root / closed).chmod(0o755)
    assert len(documents(config)) == 6


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    Path(os.fsdecode(path)).write_text("x")
    for place in (tmp_path, Path(os.fsdecode(path))):
        assert r"caf\xe9.txt' is not UTF-8; rename the file" in refusal("text", place)


# --- limits


@given(pairs=PAIRS, limit=st.integers(1, 30), block=st.integers(1, 5))
@settings(deadline=None)
def test_text_beyond_the_limit_is_not_read(pairs: list[tuple[str, str]], limit: int, block: int) -> None:
    def documents() -> Iterator[Document]:
        for name, text in pairs:
            assert sum(read) < limit, "a document beyond the limit is asked for"
            raw = text.encode()
            read.append(len(raw))
            yield Document(name, len(raw), [raw[i : i + block] for i in range(0, len(raw), block)])

    read: list[int] = []
    found = b"".join(b"".join(document.blocks) for document in limited(documents(), limit))
    whole = "".join(text for _, text in pairs).encode()
    assert whole.startswith(found)
    assert found == whole or limit - 4 < len(found) <= limit
    found.decode()


def test_a_text_with_another_hash_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("ähm\r\n")
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    config = DataConfig(source="text", path=str(path), sha256=right.upper())
    assert documents(config) == [("", "ähm\r\n")]
    path.write_text("ahm\r\n")
    with pytest.raises(UserError, match=f"expected one file of data.sha256={right.upper()}"):
        documents(config)
    (tmp_path / "b.txt").write_text("another")
    with pytest.raises(UserError, match="is 2 files, expected one"):
        documents(replace(config, path=str(tmp_path)))
    with pytest.raises(UserError, match=r"data\.sha256=x: is for data=text"):
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
    with pytest.raises(UserError, match=r"^data\.path=.*: no such file, folder or glob"):
        check_paths(config, TokenizerConfig())
    for suffix in ("jsonl", "csv", "parquet"):
        (tmp_path / f"a.{suffix}").touch()
    check_paths(replace(config, path=str(tmp_path)), TokenizerConfig())


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    tokenizer = TokenizerConfig(kind="file", vocab_size=None, path=str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"^tokenizer\.path=.*json: no such file; expected a tokenizer\.json"):
        check_paths(DataConfig(), tokenizer)
    (tmp_path / "tokenizer.json").touch()
    check_paths(DataConfig(), tokenizer)
