"""Text from every source becomes the same documents at any location, and errors name what cannot be read."""

import csv
import gzip
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest
from conftest import as_nobody, small_disk

from lm.config import DataConfig, TokenizerConfig
from lm.data.paths import listed
from lm.data.sources import open_source, text_size
from lm.data.tokens import prepare
from lm.errors import UserError
from lm.lab.sources import tables
from tests.helpers import hub, texts

BYTE = TokenizerConfig(kind="byte", vocab_size=None)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(source: str, path: object, **settings: object) -> list[tuple[str, str]]:
    """The names and texts of what is read."""
    config = DataConfig(source=source, path=None if source == "stdlib" else str(path), **settings)
    documents = open_source(config).documents(config.max_bytes)
    return [(name, text.decode()) for name, blocks in documents if (text := b"".join(blocks))]


def refusal(source: str, path: object, **settings: object) -> str:
    with pytest.raises((UserError, OSError)) as caught:
        prepare(DataConfig(source=source, path=str(path), seq_len=1, **settings), BYTE)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_folder(root: Path) -> Path:
    (root / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/z.txt", "deep/er/y.md", "c[1].txt", "c1.txt"):
        (root / name).write_text(f"text of {name}\r\n", newline="")
    return root


NAMES = ["a.txt", "b.txt", "c1.txt", "c[1].txt", "deep/er/y.md", "deep/z.txt"]


# --- files


def test_the_standard_library_is_a_large_text_without_tests() -> None:
    documents = load("stdlib", None)
    names = [name for name, _ in documents]
    assert sum(len(text) for _, text in documents) > 1_000_000
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert all(name.endswith(".py") and not Path(name).is_absolute() for name in names)
    assert not {"test", "tests", "site-packages"} & {part for name in names for part in Path(name).parts}
    assert not any(os.path.expanduser("~/") in text for _, text in documents)


def test_file_folder_and_glob_give_named_documents_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folder(tmp_path / "texts")
    (root / "b.txt").write_bytes(b"\xef\xbb\xbftext of b.txt\r\n")  # with a byte-order mark
    assert load("text", root / "a.txt") == [("", "text of a.txt\r\n")]  # the name of a single file is no part of it
    assert load("text", root / "c[1].txt") == [("", "text of c[1].txt\r\n")]  # a file takes precedence over a glob
    assert load("text", root) == [(name, f"text of {name}\r\n") for name in NAMES]
    odd = write_folder(tmp_path / "a [1] *")  # folders that exist as they stand
    for pattern, names in {"*.txt": NAMES[:4], "**/*.txt": [*NAMES[:4], "deep/z.txt"], "d*/e*/*": [""]}.items():
        for folder in (root, odd):
            (folder / "empty.txt").touch()
            assert [name for name, _ in load("text", folder / pattern)] == names
    assert listed(f"{odd}/d*", "run_dir", folders=True) == [str(odd / "deep")]
    monkeypatch.chdir(root)
    assert load("text", ".") == load("text", root) == load("text", f"../{root.name}")


def test_links_to_files_are_followed_and_links_to_folders_are_not(tmp_path: Path) -> None:
    """Two links of a folder to itself would have more paths than can be counted."""
    root = write_folder(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/o.txt").write_text("outside")
    for name, target in {"link.txt": "a.txt", "nowhere": "absent", "out": "../out", "deep/u": "..", "v": "."}.items():
        (root / name).symlink_to(target)
    for pattern in (".", "**", "**/*"):
        assert {name for name, _ in load("text", root / pattern)} == {*NAMES, "link.txt"}
    assert load("text", root / "out") == [("", "outside")], "a link that is named is followed"


@pytest.mark.parametrize("closed", ["deep/er", "b.txt"])
def test_a_closed_folder_or_file_is_named(closed: str, open_folder: Path) -> None:
    root = write_folder(open_folder / "texts")
    (root / closed).chmod(0)
    with as_nobody(), pytest.raises((UserError, PermissionError), match=re.escape(str(root / closed))):
        load("text", root)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    cases = (
        ("latin.txt", b"a" * (1 << 20) + "é and ".encode() + b"\xe9...", ".", "latin.txt: not UTF-8 at byte 1048583"),
        ("end.txt", b"abc\xc3", "end.txt", "end.txt: not UTF-8 at byte 3 "),
        ("utf16.txt", "text".encode("utf-16"), ".", "iconv -f utf-16 -t utf-8"),
        ("utf16le.txt", "text of".encode("utf-16-le"), ".", "utf-16le"),
        ("t.pdf", b"%PDF-1.4\n\xe2\xe3\x02", ".", "not UTF-8 at byte 9"),
        ("t.tar.gz", gzip.compress(b"t.txt\0\0\0ustar"), ".", "not UTF-8 at byte 5 (a byte of zero)"),
        ("t.parquet", b"PAR1\xff", ".", "use data=parquet"),
        ("empty.txt", b"", "empty.txt", "data.path="),
        ("a.txt", b"abc", "*.rst", "data.path="),
        ("a.txt.gz", gzip.compress(b"abc" * 999, mtime=0)[:-9], ".", "a.txt.gz: "),
        *((f"t.{kind}", b"\xff\xfe", f"t.{kind}", f"t.{kind}: ") for kind in ("json", "csv", "parquet")),
    )
    for i, (name, content, place, words) in enumerate(cases):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / name).write_bytes(content)
        kind = place.partition(".")[2]
        assert words in refusal(kind if kind in ("json", "csv", "parquet") else "text", folder / place)


def test_a_text_with_another_hash_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "texts/a.txt"
    path.parent.mkdir()
    path.write_text("ähm\r\n" * 999, newline="")
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    assert load("text", path, sha256=right.upper())[0][1].startswith("ähm\r\n")
    prepare(DataConfig(source="text", path=str(path), sha256=right, max_bytes=100, seq_len=8), BYTE)
    path.write_text("ahm\r\n")
    assert f"data.sha256={right}" in refusal("text", path, sha256=right)
    (tmp_path / "texts/b.txt").write_text("another")
    assert "2 files" in refusal("text", path.parent, sha256=right)


def test_a_separator_ends_a_document_and_is_noticed_without_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stories, path, mark = ["é one\n", "\ntwo", "日本 3"], tmp_path / "texts/a.txt", "<|endoftext|>"
    path.parent.mkdir()
    path.write_text(mark.join([*stories, ""]))
    config = DataConfig(source="text", path=str(path), seq_len=1)
    for _ in range(2):  # also when the tokens are there
        prepare(config, BYTE)
        assert f"{mark} 3 times" in caplog.messages[-1]
    caplog.clear()
    data = prepare(replace(config, separator=mark, max_bytes=15), BYTE)  # which ends inside a character
    assert sorted("".join(itertools.chain(*texts.documents(data)))) == sorted("é one\n\ntwo日")
    assert mark not in caplog.text
    for block in (1, 7, 1000):
        monkeypatch.setattr("lm.data.sources.BLOCK", block)
        assert load("text", path, separator=mark) == [(f":{i}", story) for i, story in enumerate(stories, 1)]
    (path.parent / "b.txt").write_text("whole")
    assert [name for name, _ in load("text", path.parent, separator=mark)][-2:] == ["a.txt:3", "b.txt:1"]
    assert "data.separator=###" in refusal("text", path, separator="###")


def test_a_table_that_is_read_as_text_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.csv").write_text("text,n\na,1\n")
    (tmp_path / "t.txt").write_text("text\n")
    for _ in range(2):  # also when the tokens are there
        caplog.clear()
        prepare(DataConfig(source="text", path=f"{tmp_path}/t.txt", seq_len=1), BYTE)
        assert "table" not in caplog.text
        prepare(DataConfig(source="text", path=f"{tmp_path}/t.csv", seq_len=1), BYTE)
        assert "data=csv" in caplog.text


# --- tables


def write_tables(folder: Path, texts: list[str | None]) -> list[tuple[str, Path]]:
    """The same rows as JSON Lines, plain and compressed, a JSON list, CSV and Parquet: kind and file of each."""
    folder.mkdir()
    rows = [{"n": i, "text": text} for i, text in enumerate(texts)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    with pa.CompressedOutputStream(str(folder / "c.jsonl.zst"), "zstd") as file:
        file.write(lines)
    (folder / "d.json").write_text(json.dumps(rows, indent=1))
    with open(folder / "e.csv", "w", encoding="utf-8-sig", newline="") as table:
        writer = csv.writer(table)
        writer.writerows([("n", "text"), *((i, text) for i, text in enumerate(texts))])
    pa.parquet.write_table(pa.table({"n": range(len(texts)), "text": texts}), folder / "f.parquet", row_group_size=3)
    return [(path.name.split(".")[1].removesuffix("l"), path) for path in sorted(folder.iterdir())]


NUMBERS = ["NA", "null", "nan", "007", "3.50", "true", "2020-01-01"]  # or what a library takes for something else
TEXTS = ["a", "b\n", "", None, *NUMBERS, ' "q" \r\n', "é\u2028", "日本"]


def test_each_row_is_a_document_and_no_type_is_guessed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    rows = [(f"row {i}", text) for i, text in enumerate(TEXTS) if text]
    for kind, path in write_tables(tmp_path / "tables", TEXTS):
        assert load(kind, path) == rows
        assert refusal(kind, path, column="txet") == "data.column=txet: the columns are n, text"
        if kind != "csv":
            assert refusal(kind, path, column="n").startswith("data.column=n: row 0 holds 0")
    assert [text for _, text in load("json", tmp_path / "tables")] == [text for _, text in rows] * 4
    assert [text for _, text in load("csv", tmp_path / "tables", column="n")][:3] == ["0", "1", "2"]
    prepare(DataConfig(source=kind, path=str(path), seq_len=8), BYTE)
    assert "2 of 14 rows are empty or null" in caplog.text


CSV = {  # the content of a file with a column `text` -> its texts, or what the refusal names
    "text\nplain one\nalpha, beta\n": "row 1 (line 3)",
    "id,text\n0,Cleo sought a kite, and Edda\n1,x\n": "row 0 (line 2)",
    "text,n\nhello,a,\nworld,b,\n": ["hello", "world"],
    'id,text\n0,"a\nb"\n1, "c,d"\n': "row 1 (line 4)",
    "id,text,n\n0,a\nb,1\n": "row 0 (line 2)",  # a line break that is not quoted
    'id,text\n0,"He said \\"hi\\", twice"\n': "row 0 (line 2)",
    'id,text\n0,a\n1,"open\n2,b\n': "row 1 (line 3)",
    "id;text\n0;a\n": "its cells end in semicolons; expected commas",
    "text,text\na,b\n": "data.column=text",
    "\n\n": "is empty",
    "text\n  \n\n\t\n": ["  ", "\t"],
    "\ntext,n\n \n a,1\n": [" a"],
    '\ufefftext,n,n\r"a\rb ""c""",1,2\r': ['a\rb "c"'],
    'text,n\r\n"a\0\r\n\u2028",1\r\nsaid "b"': "row 1 (line 4)",
    'n,text\n1,"a\0"\n2,said "b"': ["a\0", 'said "b"'],
    f"n,text\n1,{'long ' * 50_000}\n": ["long " * 50_000],
}


@pytest.mark.parametrize("content", CSV, ids=lambda content: content[:30])
def test_a_csv_file_is_read_by_its_rules_or_refused_with_the_row(content: str, tmp_path: Path) -> None:
    path, expected = tmp_path / "t.csv", CSV[content]
    path.write_bytes(content.encode())
    if isinstance(expected, str):
        assert expected in refusal("csv", path)
    else:
        assert [text for _, text in load("csv", path)] == expected


def test_a_tsv_file_has_no_quoting(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text('id\ttext\n1\t"Well, said Ada\n2\tBo left\n3\tand so did she."\n4\t"Cleo" slept\n')
    assert [text for _, text in load("csv", path)] == [
        '"Well, said Ada',
        "Bo left",
        'and so did she."',
        '"Cleo" slept',
    ]
    path.write_text("id\ttext\n1\ta\tb\n")
    assert "row 0 (line 2): expected 2 cells, found 3; a cell holds no tab" in refusal("csv", path)


@pytest.mark.parametrize("ending", ["ndjson", "jl", "jsonlines", "jsonl.gz"])
def test_json_lines_have_several_endings(ending: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, lines = tmp_path / f"t.{ending}", b'{"text": "a"}\n{"text": "b"}\n'
    path.write_bytes(gzip.compress(lines) if ending.endswith("gz") else lines)
    assert [text for _, text in load("json", tmp_path)] == ["a", "b"]
    prepare(DataConfig(source="text", path=str(path), seq_len=1), BYTE)
    assert "data=json" in caplog.text


def test_json_lines_of_another_ending_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.txt").write_text('{"text": "a"}\n')
    prepare(DataConfig(source="text", path=f"{tmp_path}/t.txt", seq_len=1), BYTE)
    assert "looks like a table; data=json" in caplog.text


def test_a_web_page_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.txt").write_text("\n<!DOCTYPE html>\n<html><p>Some text")
    prepare(DataConfig(source="text", path=f"{tmp_path}/t.txt", seq_len=1), BYTE)
    assert "looks like a web page" in caplog.text


@pytest.mark.parametrize("content", ['{"text": "a"}\n{"text": "b", "text": "c"}', '[{"n": 1, "text": "b", "n": 2}]'])
def test_a_key_that_is_there_twice_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    message = refusal("json", tmp_path / "t.jsonl")
    assert "an object has the key" in message
    assert ("line 2: " in message) == (content[0] == "{")


def test_strings_of_parquet_that_are_stored_as_bytes_are_utf_8(tmp_path: Path) -> None:
    pa.parquet.write_table(
        pa.table({"text": pa.array(["é".encode(), None, b"b"], pa.binary())}), tmp_path / "t.parquet"
    )
    assert [text for _, text in load("parquet", tmp_path / "t.parquet")] == ["é", "b"]
    pa.parquet.write_table(pa.table({"text": pa.array([b"\xff"], pa.binary())}), tmp_path / "t.parquet")
    assert "row 0 holds bytes that are not UTF-8" in refusal("parquet", tmp_path / "t.parquet")


def test_rows_that_are_lines_end_in_a_line_break(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("a", "", "b\n", "c")))
    assert [text for _, text in load("json", tmp_path / "t.jsonl", rows="lines")] == ["a\n", "b\n", "c\n"]


def test_a_row_that_is_no_string_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    """And the rows before it are not changed. They fill more than a block."""
    texts = [f'line one of {i}\nline "two"\n' + "x y " * 250 for i in range(1100)]
    lines, path = [json.dumps({"text": text}) for text in texts], tmp_path / "t.jsonl"
    path.write_text("\n".join(lines))
    assert path.stat().st_size > tables.BLOCK
    assert [text for _, text in load("json", path)] == texts
    for odd in ('{"text": 2024}', '{"text": "\\ud800"}', "[1]", "{"):
        path.write_text("\n".join([*lines, odd]))
        message = refusal("json", path)
        assert "line 1101 is not JSON" in message if odd == "{" else "data.column=text: row 1100 " in message


# --- addresses


FILES = "/datasets/owner/files/resolve/main"  # where a Hub serves the files of a repository, as any server might


@pytest.fixture
def server() -> Iterator[hub.Hub]:
    with hub.serve() as running:
        yield running


def test_an_address_is_read_like_a_file(server: hub.Hub, tmp_path: Path) -> None:
    rows, memory = write_tables(tmp_path / "tables", ["a", "b\n"]), fsspec.filesystem("memory")
    files = {path.name: path.read_bytes() for _, path in rows}
    server.commit("owner/files", files | {"some.txt": "served é\r\n".encode()})
    assert load("text", f"{server.address}{FILES}/some.txt?version=1") == [("", "served é\r\n")]
    for kind, path in rows:
        memory.pipe(f"/{path.name}", path.read_bytes())
        address = f"{server.address}{FILES}/{path.name}"
        for place in (f"memory://{path.name}", address, f"{address}?download=1"):
            assert load(kind, place) == [("row 0", "a"), ("row 1", "b\n")]


def test_an_address_is_downloaded_once_and_needs_no_network_afterwards(server: hub.Hub, tmp_path: Path) -> None:
    files = {"some.txt": b"the text\n" * 99, "cut.txt.gz": gzip.compress(b"another text\n" * 99)}
    server.commit("owner/files", files)
    config = DataConfig(source="text", path=f"{server.address}{FILES}/some.txt", seq_len=8)
    first, asked = prepare(config, BYTE), [*server.asked]
    assert text_size(config, limit=10**6) == 9 * 99
    assert server.asked == asked
    server.commit("owner/files", dict.fromkeys(files, b"a later version\n" * 99))
    server.fault = lambda path: 503
    assert prepare(config, BYTE).hash == first.hash
    prepare(config, TokenizerConfig(kind="char", vocab_size=None))
    with pytest.raises(UserError, match=r"^data\.path=http.*cut\.txt\.gz: could not be downloaded \(status 503\)"):
        load("text", f"{server.address}{FILES}/cut.txt.gz")
    server.fault = lambda path: None
    with pytest.raises(UserError, match=r"downloaded to .*/cache/.*\.txt\): has .*data\.sha256="):
        prepare(replace(config, sha256="0" * 64), BYTE)


@pytest.mark.parametrize("name", ["some.txt.gz", "some.txt"])
def test_a_file_may_be_sent_with_an_encoding(name: str, server: hub.Hub) -> None:
    """Of a file that is compressed itself, a server may say that its content has this encoding."""
    server.commit("owner/files", {name: gzip.compress(b"the text\n")})
    server.encoding = "gzip"
    assert load("text", f"{server.address}{FILES}/{name}") == [("", "the text\n")]


def test_a_download_that_breaks_off_is_not_taken_for_the_file(server: hub.Hub) -> None:
    server.commit("owner/files", {"some.txt": b"the text\n" * 99_999})
    url = f"{server.address}{FILES}/some.txt"
    with small_disk(), pytest.raises(OSError, match=r"too large|space") as caught:
        load("text", url)
    assert "/downloads" in str(caught.value.filename)
    assert [text for _, text in load("text", url)] == ["the text\n" * 99_999]


def test_a_dead_address_is_named() -> None:
    for url in ("http://127.0.0.1:9/x.txt", "https:///", "nosuch://x/y.txt"):
        assert refusal("text", url).startswith(f"data.path={url}: ")
