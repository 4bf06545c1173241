"""What is downloaded from an address ends within stated limits, in one line if it cannot be used."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lm.config import DataConfig, UserError
from lm.data import download as module
from lm.data.cache import locked
from lm.data.corpus import stored_text
from lm.data.download import download

CHUNKED = {"Transfer-Encoding": "chunked"}
PARTS = {  # headers, then the body in blocks; None: a pause longer than any time-out
    "/whole.txt": [{"ETag": "1"}, b"the text"],
    "/endless.txt": [{}, *[b"x" * 100] * 10_000],
    "/large.txt": [{"Content-Length": "5000000"}],
    "/stalled.txt": [{}, b"x", None],
    "/torn.txt": [{"Content-Length": "10"}, b"x"],
    "/long_chunk.txt": [CHUNKED, *[b"0"] * 100],
    "/long_redirect.txt": [{"Location": "/absent.txt"}, *[b"x"] * 100],
    "/gzip.txt": [{"Content-Encoding": "gzip"}, b"x"],
    "/elsewhere.txt": [{"Location": "file:///etc/passwd"}],
    "/cut.txt": [{}, "é".encode() * 5000],
}
SENT: list[str] = []  # the path for each block that a server has written
SAID = {
    "/endless.txt": "more than 1000 bytes",
    "/large.txt": "5000000 bytes, expected at most 1000",
    "/stalled.txt": "TimeoutError: timed out",
    "/long_redirect.txt": "HTTPError: HTTP Error 404: Not Found",
    "/torn.txt": "it breaks off after 1 of 10 bytes",
    "/gzip.txt": "it is sent compressed by gzip, which was not asked for",
    "/elsewhere.txt": "HTTPError: HTTP Error 302: Found - Redirection to url 'file:///etc/passwd' is not allowed",
    "/absent.txt": "HTTPError: HTTP Error 404: Not Found",
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        headers, *blocks = PARTS.get(self.path, [None])  # type: ignore[misc]
        self.close_connection = True
        self.send_response(404 if headers is None else 302 if "Location" in headers else 200)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        try:
            self.end_headers()
            for block in blocks:
                if block is None or len(block) == 1 < len(blocks):
                    time.sleep(0.02 if block else 1)
                self.wfile.write(block or b"")
                SENT.append(self.path)
        except OSError:  # nobody reads it any more
            pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads = True
        running.block_on_close = False
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.parametrize("path", SAID)
def test_what_has_no_end_or_is_not_whole_is_refused(
    path: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    with pytest.raises(UserError) as caught:
        download(f"{server}{path}", tmp_path)
    advice = "give data.path=FILE, a local copy"
    assert str(caught.value) == f"data.path={server}{path}: could not be downloaded ({SAID[path]}); {advice}"
    assert not [one for one in tmp_path.rglob("*") if one.is_file() and one.suffix != ".lock"]


def test_ctrl_c_ends_a_download_at_once(server: str, tmp_path: Path) -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        download(f"{server}/long_chunk.txt", tmp_path)
    assert 0 < SENT.count("/long_chunk.txt") < 100


def test_a_version_is_downloaded_once(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 3)
    first = download(f"{server}/whole.txt", tmp_path)
    assert first.read_text() == "the text"
    written = first.stat()
    assert download(f"{server}/whole.txt", tmp_path).stat() == written
    monkeypatch.setitem(PARTS, "/whole.txt", [{"ETag": "2"}, b"another text"])
    assert download(f"{server}/whole.txt", tmp_path).read_text() == "another text"


def test_what_another_process_has_downloaded_meanwhile_is_used(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def late(folder: Path) -> AbstractContextManager[None]:
        monkeypatch.setattr(module, "locked", locked)
        begun.append(download(f"{server}/whole.txt", tmp_path).stat())  # by the other, which had the lock
        return locked(folder)

    monkeypatch.setattr(module, "locked", late)
    assert [download(f"{server}/whole.txt", tmp_path).stat()] == begun


def test_a_copy_serves_where_the_server_cannot_be_reached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=[0.01], daemon=True).start()
        url = f"http://127.0.0.1:{running.server_port}/whole.txt"
        kept = download(url, tmp_path)
        running.shutdown()
    assert download(url, tmp_path) == kept
    assert f"data.path={url}: could not be reached (" in caplog.text
    for other, part in ((url, 5), (f"{url}?2", None)):
        with pytest.raises(UserError, match="could not be downloaded"):
            download(other, tmp_path, part)


def test_no_more_is_downloaded_of_a_text_than_is_read(server: str, tmp_path: Path) -> None:
    config = DataConfig(source="text", path=f"{server}/cut.txt", max_bytes=999, cache_dir=str(tmp_path))
    assert stored_text(config).open().size == 998
    (kept,) = tmp_path.glob("downloads/*/cut.txt")
    assert kept.stat().st_size == 1000
