"""A text is read again if and only if its source may have changed, and what is kept of it is checked."""

import json
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Listed, as_nobody
from test_data import BYTE, damage

from lm.config import DataConfig, UserError
from lm.data import store as module
from lm.data.cache import ReadOnlyCache
from lm.data.corpus import stored_text
from lm.data.documents import Document, Fingerprint
from lm.data.store import StoredText
from lm.data.text import Text
from lm.data.tokens import prepare
from lm.system.files import STALE_SECONDS


@pytest.fixture
def source(corpus: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(source="text", path=str(corpus), seq_len=8, cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each time that a source has been read."""
    found: list[object] = []

    def counted(*arguments: object) -> module.Scan:
        found.append(arguments[0])
        return scan(*arguments)

    scan = module.scan
    monkeypatch.setattr(module, "scan", counted)
    return found


def age(path: Path) -> None:
    """Wait until the last change of a file lies so far back that its times tell of any later one."""
    while path.stat().st_ctime_ns > time.time_ns() - module.RACY:
        time.sleep(0.05)


def test_an_unchanged_text_is_read_once(
    source: DataConfig, scans: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RACY", 10**7)
    age(Path(str(source.path)))
    found = [stored_text(source).hash for _ in range(3)]
    assert len(scans) == 1
    assert len(set(found)) == 1
    assert stored_text(replace(source, verify=True)).hash == found[0]
    assert len(scans) == 2


def test_a_file_of_the_future_is_read_once(
    source: DataConfig, scans: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any change of it sets the time of its status, which no program can choose."""
    monkeypatch.setattr(module, "RACY", 10**7)
    os.utime(str(source.path), (2**32, 2**32))
    age(Path(str(source.path)))
    assert stored_text(source).hash == stored_text(source).hash
    assert len(scans) == 1
    text = Path(str(source.path)).read_bytes()
    Path(str(source.path)).write_bytes(text[::-1])
    os.utime(str(source.path), (2**32, 2**32))
    assert stored_text(source).open().hash == stored_text(source).hash
    assert len(scans) > 1


def test_a_text_that_was_changed_just_before_is_read_again(source: DataConfig, scans: list[object]) -> None:
    """Its times could be the same after another change."""
    for _ in range(3):
        stored_text(source)
    assert len(scans) == 3


@pytest.mark.parametrize("how", ["same size and times", "other times", "other inode", "longer"])
def test_a_changed_text_is_read_again(
    how: str, source: DataConfig, scans: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RACY", 10**7)
    path = Path(str(source.path))
    age(path)
    before, status = stored_text(source).hash, path.stat()
    other = path.read_text().replace("return", "RETURN")
    match how:
        case "longer":
            path.write_text(other + "more")
        case "other inode":
            Path(f"{path}.new").write_text(other)
            os.replace(f"{path}.new", path)
        case _:
            path.write_text(other)
    if how != "other times":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = stored_text(source)
    assert after.hash != before
    assert after.open().size == path.stat().st_size


def test_a_touched_text_is_read_but_not_written_again(source: DataConfig, scans: list[object]) -> None:
    before = stored_text(source)
    stamp = (before.folder / "text.bin").stat()
    os.utime(str(source.path))
    assert stored_text(source).hash == before.hash
    assert (before.folder / "text.bin").stat() == stamp


class Changing(Listed):
    """A source whose state is another one each time that it is asked."""

    def fingerprint(self) -> Fingerprint:
        self.pairs = [*self.pairs, ("more", "text")]
        return super().fingerprint()


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="changed while it was being read"):
        StoredText(tmp_path, Changing([("a", "b")]), "here", request="r", max_bytes=None, verify=False, quiet=True)
    assert list((tmp_path / "texts").glob("[!r]*")) == []


def test_a_file_that_grows_while_it_is_read_is_named(source: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(str(source.path))

    class Growing(Listed):
        def documents(self) -> Iterator[Document]:
            for document in files.documents():
                with open(path, "a") as file:
                    file.write("more")
                yield document

    files = stored_text(source).source
    monkeypatch.setitem(module.__dict__, "RACY", 0)
    with pytest.raises(UserError, match=f"{path}: changed while it was being read"):
        module.scan(Growing([]))


@pytest.mark.parametrize("name", ["text.bin", "documents.bin"])
def test_a_damaged_text_is_read_again(name: str, source: DataConfig) -> None:
    stored, draw = stored_text(source), random.Random(0)
    right = {file: (stored.folder / file).read_bytes() for file in ("text.bin", "documents.bin", "meta.json")}
    for _ in range(8):
        damage(stored.folder / name, draw)
        assert stored_text(source).open().hash == stored.hash
        assert {file: (stored.folder / file).read_bytes() for file in right} == right


@pytest.mark.parametrize("name", ["meta.json", "entry"])
def test_what_was_cut_off_is_written_again(name: str, source: DataConfig) -> None:
    stored = stored_text(source)
    stored.open()
    path = stored.entry if name == "entry" else stored.folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert stored_text(source).open().hash == stored.hash
    assert json.loads(path.read_bytes()).keys() == json.loads(whole).keys()


def test_what_killed_processes_left_is_removed(source: DataConfig) -> None:
    texts = Path(source.cache_dir) / "texts"
    for name in ("other.partial", f"{stored_text(source).request.name}.partial"):
        (texts / name).mkdir()
        (texts / name / "text.bin").write_text("half of it")
    old, new = (texts.with_name("sources") / f".partial-{age}" for age in ("old", "new"))
    for one in old, new:  # one is of a process that may still be writing
        one.touch()
    os.utime(old, (time.time() - STALE_SECONDS,) * 2)
    with open(str(source.path), "a") as file:
        file.write("more")
    stored_text(source)
    assert list(texts.glob("*.partial")) == []
    assert (old.exists(), new.exists()) == (False, True)


def test_the_same_text_from_two_sources_at_once_is_not_taken_away(
    source: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder that another process has made meanwhile, and may be reading, stays."""
    (tmp_path / "copy").mkdir()
    copy = replace(source, path=shutil.copy(str(source.path), tmp_path / "copy"))
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("lm.data.cache.PATIENCE", 0.01)
    made: list[tuple[int, int]] = []

    def store_copy() -> None:
        folder = stored_text(copy).folder
        made.append(((folder / "text.bin").stat().st_ino, folder.stat().st_ino))

    def open_late(folder: Path) -> Text:
        try:
            return open_text(folder)
        except FileNotFoundError:
            monkeypatch.setattr(module, "open_text", open_text)
            other.start()
            other.join(0.3)
            raise

    open_text, other = module.open_text, threading.Thread(target=store_copy)
    monkeypatch.setattr(module, "open_text", open_late)
    folder = stored_text(source).folder
    other.join()
    assert made == [((folder / "text.bin").stat().st_ino, folder.stat().st_ino)]
    assert caplog.messages == [f"{folder}: is being written by another process; waiting for it"]


def test_a_read_only_cache_serves_what_it_holds(source: DataConfig, open_folder: Path) -> None:
    shutil.copy(str(source.path), open_folder / "corpus.txt")
    source = replace(source, path=str(open_folder / "corpus.txt"), cache_dir=str(open_folder / "cache"))
    right = prepare(source, BYTE)
    with as_nobody():
        assert prepare(source, BYTE).hash == right.hash
        with pytest.raises(
            ReadOnlyCache, match=r"data\.cache_dir=.*cache: Permission denied; expected a folder to write"
        ):
            prepare(replace(source, val_fraction=0.3), BYTE)
