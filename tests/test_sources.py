"""Text from every source becomes the same documents at any location, and errors name what cannot be read."""

import csv
import gzip
import hashlib
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from lm.config import DataConfig, TokenizerConfig
from lm.data.paths import kind_of, listed
from lm.data.sources import open_source, text_size
from lm.data.tokens import prepare
from lm.errors import UserError
from lm.lab.sources import tables
from tests.helpers import hub, texts
from tests.helpers.limits import as_nobody, small_disk
from tests.helpers.refusals import refused
from tests.helpers.texts import BYTE


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(source, path, **settings):
    """The names and texts of what is read."""
    config = DataConfig(source=source, path=None if source == "stdlib" else str(path), **settings)
    documents = open_source(config).documents()
    return [(name, text.decode()) for name, blocks in documents if (text := b"".join(blocks))]


def texts_in(source, path, **settings):
    return [text for _, text in load(source, path, **settings)]


def refusal(source, path, **settings):
    with pytest.raises((UserError, OSError)) as caught:
        prepare(DataConfig(source=source, path=str(path), seq_len=1, **settings), BYTE)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_folder(root):
    (root / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/z.txt", "deep/er/y.md", "c[1].txt", "c1.txt"):
        (root / name).write_text(f"text of {name}\r\n", newline="")
    return root


NAMES = ["a.txt", "b.txt", "c1.txt", "c[1].txt", "deep/er/y.md", "deep/z.txt"]


# --- files


def test_the_standard_library_is_a_large_text_without_tests():
    documents = load("stdlib", None)
    parts = [Path(name).parts for name, _ in documents]
    assert sum(len(text) for _, text in documents) > 1_000_000
    assert {("argparse.py",), ("json", "decoder.py")} <= {*parts}
    assert parts == sorted(parts)
    assert all(part[-1].endswith(".py") and not {"/", "test", "tests", "site-packages"} & {*part} for part in parts)


def test_file_folder_and_glob_give_named_documents_in_order(tmp_path, monkeypatch):
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
    assert listed(str(odd), "run_dir") == [str(odd)]
    (root / "__pycache__").mkdir()
    (root / "__pycache__/a.txt").write_bytes(b"\0")  # of no interest, as Python's cache of compiled code
    (root / ".git").mkdir()
    for hidden in (".DS_Store", ".git/HEAD"):
        (root / hidden).write_bytes(b"\0")
    assert load("text", root) == [(name, f"text of {name}\r\n") for name in NAMES]
    monkeypatch.chdir(root)
    assert load("text", ".") == load("text", root) == load("text", f"../{root.name}")


@pytest.mark.parametrize("closed", ["deep/er", "b.txt"])
def test_a_closed_folder_or_file_is_named(closed, open_folder):
    root = write_folder(open_folder / "texts")
    (root / closed).chmod(0)
    with as_nobody():
        assert str(root / closed) in refusal("text", root)


def test_a_link_to_nowhere_is_named(tmp_path):
    root = write_folder(tmp_path / "texts")
    (root / "gone.txt").symlink_to("nowhere")
    for path in (root, root / "*.txt"):
        assert str(root / "gone.txt") in refusal("text", path)


UNREADABLE = [  # file, its content, and what the refusal names
    (
        "latin.txt",
        b"a" * (1 << 20) + "é and ".encode() + b"\xe9...",
        "latin.txt: not UTF-8 (invalid continuation byte) at byte 1048583; if",
    ),
    ("latin.txt", "Größe".encode("latin-1"), "iconv -f ENCODING -t utf-8"),
    ("end.txt", b"abc\xc3", "end.txt: not UTF-8 (unexpected end of data) at byte 3;"),
    *(
        (f"{kind}.txt", "text of".encode(kind), "`file FILE` names its encoding")
        for kind in ("utf-16", "utf-16le", "utf-16be")
    ),
    ("t.txt", b"t.txt\0\0\0ustar", "has a zero byte at byte 5; if it is a text"),
    ("t.txt", b"PAR1\xff", "use data=parquet"),
    ("t.txt", gzip.compress(b"text"), "t.txt: is compressed by gzip; expected a name that ends in .gz"),
    ("empty.txt", b"", "data.path="),
    ("a.txt.gz", gzip.compress(b"abc" * 999, mtime=0)[:-9], "a.txt.gz: "),
    *((f"t.{kind}", b"\xff\xfe", f"t.{kind}: ") for kind in ("json", "csv", "parquet")),
]


def test_what_cannot_be_read_is_named(tmp_path):
    for i, (name, content, words) in enumerate(UNREADABLE):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / name).write_bytes(content)
        for place in (folder / name, folder):
            assert words in refusal(kind_of(name), place)


def test_a_name_that_ends_as_another_kind_is_refused(tmp_path):
    """Such a file would be read by the rules of another format: the lines of JSON as rows of CSV."""
    names = {"rows.jsonl": "csv", "rows.csv.gz": "json", "rows.parquet": "json", "rows.tsv": "tokens"}
    for name, source in names.items():
        (tmp_path / name).write_text('{"text": "a"}\n' * 99)
        assert f"expected data={kind_of(name)}" in refusal(source, tmp_path / name)


def test_a_text_with_another_hash_is_refused(tmp_path):
    path = tmp_path / "texts/a.txt"
    path.parent.mkdir()
    path.write_text("ähm\r\n" * 999, newline="")
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    assert load("text", path, sha256=right.upper())[0][1].startswith("ähm\r\n")
    path.write_text("ahm\r\n")
    assert f"data.sha256={right}" in refusal("text", path, sha256=right)
    (tmp_path / "texts/b.txt").write_text("another")
    assert "2 files" in refusal("text", path.parent, sha256=right)


def test_a_separator_ends_a_document_and_is_noticed_without_its_setting(tmp_path, monkeypatch, caplog):
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
    val = path.with_name("b.txt")
    val.write_text("one document")
    assert prepare(replace(config, separator=mark, val_path=str(val)), BYTE).val_bytes == 12
    assert [name for name, _ in load("text", path.parent, separator=mark)][-2:] == ["a.txt:3", "b.txt:1"]
    with refused(r"^data\.separator=###: "):
        prepare(replace(config, separator="###"), BYTE)


# --- tables


def parquet(values, **options):
    file = io.BytesIO()
    pa.parquet.write_table(pa.table({"n": range(len(values)), "text": values}), file, **options)
    return file.getvalue()


def write_tables(folder, texts):
    """The same rows in files of each kind and ending, plain and compressed."""
    folder.mkdir()
    rows = [{"n": i, "text": text} for i, text in enumerate(texts)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    with pa.CompressedOutputStream(str(folder / "f.jsonl.zst"), "zstd") as file:
        file.write(lines)
    (folder / "g.json").write_text(json.dumps(rows, indent=1))
    with open(folder / "h.csv", "w", encoding="utf-8-sig", newline="") as table:
        writer = csv.writer(table)
        writer.writerows([("n", "text"), *((i, text) for i, text in enumerate(texts))])
    (folder / "i.parquet").write_bytes(parquet(texts, row_group_size=3))
    return sorted(folder.iterdir())


NUMBERS = ["NA", "null", "nan", "007", "3.50", "true", "2020-01-01"]  # or what a library takes for something else
TEXTS = ["a", "b\n", "", None, *NUMBERS, ' "q" \r\n', "é\u2028", "日本"]


def test_each_row_is_a_document_and_no_type_is_guessed(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [(f"row {i}", text) for i, text in enumerate(TEXTS) if text]
    for path in write_tables(tmp_path / "tables", TEXTS):
        kind = kind_of(str(path))
        assert load(kind, path) == rows
        assert refusal(kind, path, column="txet") == f"{path}: data.column=txet: no such column; choose one of n, text"
        if kind != "csv":
            assert refusal(kind, path, column="n").startswith(f"{path}: data.column=n: row 0 holds 0")
    assert texts_in("json", tmp_path / "tables") == [text for _, text in rows] * 4
    assert texts_in("csv", tmp_path / "tables", column="n")[:3] == ["0", "1", "2"]
    for what in ("documents", "lines"):
        caplog.clear()
        prepare(DataConfig(source=kind, path=str(path), seq_len=8, rows=what), BYTE)
        assert "2 of 14 rows are empty or null" in caplog.text


def test_rows_that_a_quotation_has_joined_are_told(tmp_path, caplog):
    """A cell of several lines is text as it stands, unless all such cells look like several rows."""
    path = tmp_path / "novel.csv"
    path.write_text('n,text\n0,"Come in\n1,said she\n2,and sit down."\n3,He sat.\n')
    assert len(texts_in("csv", path)) == 2
    assert "all 1 cells of several lines in column text look like rows" in caplog.text
    caplog.clear()
    path.write_text('n,text\n0,"Come in\n1,said she"\n1,"a poem,\nof two lines"\n')
    assert len(texts_in("csv", path)) == 2
    assert not caplog.messages


def test_a_tsv_file_that_another_program_has_quoted_is_told(tmp_path, caplog):
    cells = ['"', '"alone"', '""', '"" and ""', '"a "b" c"', '"He said ""hi"" twice"']
    (tmp_path / "t.tsv").write_text("text\n" + "\n".join(cells))
    assert texts_in("csv", tmp_path / "t.tsv") == cells
    assert "1 cells in column text are quoted" in caplog.text


@pytest.mark.parametrize(
    ("begin", "kind"),
    [
        ('{ "text": "a"}', "JSON"),
        ('[\n  {"text": "a"}]', "JSON"),
        ("[1] a note", None),
        ('<?xml version="1.0"?>', "a web page"),
        ("<!-- a page --><html>", "a web page"),
        ("\ufeff <HEAD>", "a web page"),
        ("<b> is bold", None),
    ],
)
def test_marks_that_would_be_learned_as_text_are_told(begin, kind, tmp_path, caplog):
    (tmp_path / "t.txt").write_text(f"{begin}\n{'a b c ' * 500}")
    prepare(DataConfig(source="text", path=str(tmp_path / "t.txt"), seq_len=8), BYTE)
    told = [message for message in caplog.messages if "looks like" in message]
    assert [f"looks like {kind}" in message for message in told] == [True] * bool(kind)


def test_a_table_among_the_files_of_a_text_is_told(tmp_path, caplog):
    for name, size in {"README.md": 90, "package.json": 80, "train.csv": 2000}.items():
        (tmp_path / name).write_text(f"id,text\n{'a b c ' * size}")
    prepare(DataConfig(source="text", path=str(tmp_path), seq_len=8), BYTE)
    (told,) = [message for message in caplog.messages if "looks like" in message]
    assert told.startswith(f"{tmp_path}/train.csv: looks like CSV; data=csv reads"), "most of the text is in this file"


LONG = [f'line one of {i}\nline "two"\n' + "x y " * 250 for i in range(1100)]  # more than a block
LONG_LINES = "\n".join(json.dumps({"text": text}) for text in LONG)
RULES = [  # file, its content, and its texts or what the refusal names
    ("t.csv", "text\nplain one\nalpha, beta\n", "line 3"),
    ("t.csv", "text,n\nhello,a,\nworld,b,\n", ["hello", "world"]),
    ("t.csv", "id,text,n\n0,a\nb,1\n", "line 2"),  # a line break that is not quoted
    ("t.csv", 'id,text\n0,"He said \\"hi\\", twice"\n', "line 2"),
    ("t.csv", 'id,text\n0,a\n1,"open\n2,b\n', "line 3"),
    ("t.csv", "id;text\n0;a\n", "its cells end in semicolons; expected commas"),
    ("t.csv", "text,text\na,b\n", "data.column=text"),
    ("t.csv", "\n\n", "is empty"),
    ("t.csv", "text\n  \n\n\t\n", ["  ", "\t"]),
    ("t.csv", '\ufefftext,n,n\r"a\rb ""c""",1,2\r', ['a\rb "c"']),
    ("t.csv", 'n,text\n1,"a\x01"\n2,said "b"', ["a\x01", 'said "b"']),
    ("t.csv", "text\na\0b\n", "data.column=text: row 0 holds a character of zero"),
    ("t.jsonl", '{"text": "a"}\n{"text": "b\\u0000"}', "data.column=text: row 1 holds a character of zero"),
    ("t.json", '[{"text": "a"}]'.encode("utf-16"), "save it as UTF-8"),
    ("t.csv", f"n,text\n1,{'long ' * 50_000}\n", ["long " * 50_000]),
    ("t.tsv", 'id\ttext\n1\t"Well, said\n2\tso did she."\n3\t"Cleo"\n', ['"Well, said', 'so did she."', '"Cleo"']),
    ("t.tsv", "id\ttext\n1\ta\tb\n", "line 2: expected 2 cells; a cell holds no tab"),
    ("t.jsonl", '{"text": "a"}\n{"text": "b", "text": "c"}', "line 2: an object has the key"),
    ("t.jsonl", '[{"n": 1, "text": "b", "n": 2}]', "an object has the key"),
    ("t.jsonl", '{"text": "a"}\n{"text": 5}', "t.jsonl: data.column=text: row 1 holds 5, not a string"),
    ("t.jsonl", LONG_LINES, LONG),
    ("t.jsonl", LONG_LINES + '\n{"text": "\\ud800"}', "data.column=text: row 1100 "),
    ("t.jsonl", LONG_LINES + "\n[1]", "data.column=text: row 1100 "),
    ("t.jsonl", LONG_LINES + "\n{", "line 1101 is not JSON"),
    ("t.json", '{\n "text": "a"\n}\n', "expected an object in each line, or a list of objects"),
    ("t.parquet", parquet(pa.array(["é".encode(), None, b"b"], pa.binary())), ["é", "b"]),
    ("t.parquet", parquet(pa.array([b"\xff"], pa.binary())), "row 0 holds bytes that are not UTF-8"),
]


def test_a_table_is_read_by_the_rules_of_its_kind_or_refused_with_the_row(tmp_path):
    assert len(LONG_LINES) > tables.BLOCK
    for name, content, expected in RULES:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        kind = kind_of(name)
        if isinstance(expected, list):
            assert texts_in(kind, path) == expected, content[:80]
        else:
            assert expected in refusal(kind, path), content[:80]


# --- addresses


FILES = "/datasets/owner/files/resolve/main"  # where a Hub serves the files of a repository, as any server might


@pytest.fixture
def server():
    with hub.serve() as running:
        yield running


def test_an_address_is_read_like_a_file(server, tmp_path):
    paths, memory = write_tables(tmp_path / "tables", ["a", "b\n"]), fsspec.filesystem("memory")
    files = {path.name: path.read_bytes() for path in paths}
    server.commit("owner/files", files | {"some.txt": "served é\r\n".encode()})
    assert load("text", f"{server.address}{FILES}/some.txt?version=1") == [("", "served é\r\n")]
    for path in paths:
        memory.pipe(f"/{path.name}", path.read_bytes())
        address = f"{server.address}{FILES}/{path.name}"
        for place in (f"memory://{path.name}", address, f"{address}?download=1"):
            assert load(kind_of(path.name), place) == [("row 0", "a"), ("row 1", "b\n")]


def test_an_address_is_downloaded_once_and_needs_no_network_afterwards(server):
    files = {"some.txt": b"the text\n" * 99, "cut.txt.gz": gzip.compress(b"another text\n" * 99, mtime=0)}
    server.commit("owner/files", files)
    config = DataConfig(source="text", path=f"{server.address}{FILES}/some.txt", seq_len=8)
    first = prepare(config, BYTE)
    server.commit("owner/files", dict.fromkeys(files, b"a later version\n" * 99))
    server.fault = lambda path: 503
    assert text_size(config, limit=10**6) == 9 * 99
    assert prepare(config, BYTE).hash == first.hash
    prepare(config, TokenizerConfig(kind="char", vocab_size=None))
    with refused(r"^data\.path=http.*cut\.txt\.gz: could not be downloaded \(status 503\)"):
        load("text", f"{server.address}{FILES}/cut.txt.gz")
    with refused(r"downloaded to .*/cache/.*\.txt\): has .*data\.sha256="):
        prepare(replace(config, sha256="0" * 64), BYTE)


def test_a_download_that_breaks_off_is_not_taken_for_the_file(server):
    server.commit("owner/files", {"some.txt": b"the text\n" * 99_999})
    url = f"{server.address}{FILES}/some.txt"
    with small_disk(), pytest.raises(OSError, match=r"too large|space") as caught:
        load("text", url)
    assert "/downloads" in str(caught.value.filename)
    assert texts_in("text", url) == ["the text\n" * 99_999]


def test_a_dead_address_is_named():
    for url in ("http://127.0.0.1:9/x.txt", "https:///", "nosuch://x/y.txt"):
        assert refusal("text", url).startswith(f"data.path={url}: ")
