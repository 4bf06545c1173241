"""A server that speaks the part of the Hugging Face Hub's protocol that `datasets` uses to read a data set."""

import hashlib
import io
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet

Files = dict[str, bytes]  # path in the repository -> content
PIECE = 1 << 16  # bytes of a file that are sent at a time


def shard(texts, rows=100, **columns):
    """A parquet file of one column of text, and further columns, in row groups of `rows` rows."""
    file = io.BytesIO()
    pa.parquet.write_table(pa.table({"text": texts, **columns}), file, row_group_size=rows, compression="none")
    return file.getvalue()


@dataclass
class Hub:
    """The repositories that a server holds, its faults, and what it was asked for."""

    commits: dict[tuple[str, str], Files] = field(default_factory=dict)  # (repository, commit) -> its files
    branches: dict[tuple[str, str], str] = field(default_factory=dict)  # (repository, branch or tag) -> commit
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)  # "GET /path", in order
    sent: Counter[str] = field(default_factory=Counter)  # path in the repository -> bytes sent
    fault: Callable[[str], int | None] = lambda path: None  # the path of a request -> a status to fail with
    address: str = ""

    def commit(self, repository, files):
        """Add a commit that holds these files to the main branch; return its hash."""
        content = [(path, hashlib.sha256(data).hexdigest()) for path, data in sorted(files.items())]
        commit = hashlib.sha1(json.dumps([repository, content]).encode()).hexdigest()
        self.commits[repository, commit] = files
        self.branches[repository, "main"] = commit
        return commit


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.hub.asked.append(f"{self.command} {url.path}")
        if status := self.hub.fault(url.path):
            self.answer(status)
            return
        match = re.fullmatch(r"(?:/api)?/datasets/([^/]+/[^/]+)(?:/([^/]+))?(?:/([^/]+))?/?(.*)", url.path)
        if not match:
            self.answer(404)
            return
        repository, action, revision, path = match[1], match[2] or "revision", match[3] or "main", unquote(match[4])
        commit = self.hub.branches.get((repository, revision), revision)
        files = self.hub.commits.get((repository, commit))
        if repository not in {name for name, _ in self.hub.commits}:
            self.refuse(401, "RepoNotFound")
        elif action in ("resolve", "auth-check") and repository in self.hub.gated:
            self.refuse(401, "GatedRepo")
        elif action == "auth-check":
            self.json({})
        elif files is None:
            self.refuse(404, "RevisionNotFound")
        elif action == "revision":
            gated = "manual" if repository in self.hub.gated else False
            self.json({"id": repository, "sha": commit, "siblings": [], "private": False, "gated": gated})
        elif action == "tree":
            self.json(entries(files, path, "recursive=true" in url.query.lower()))
        elif action == "paths-info":
            wanted = parse_qs(body.decode()).get("paths", [])
            self.json([entry for entry in entries(files, "", True) if entry["path"] in wanted])
        elif action == "resolve" and path in files:
            self.file(path, files[path], commit)
        else:
            self.refuse(404, "EntryNotFound")

    do_HEAD = do_POST = do_GET

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code):
        self.answer(status, X_Error_Code=code, X_Error_Message=code)

    def json(self, value):
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def file(self, path, content, commit):
        first, last = 0, len(content) - 1
        if wanted := self.headers.get("Range"):
            low, _, high = wanted.removeprefix("bytes=").partition("-")
            first, last = int(low), min(int(high or last), last)
        part = content[first : last + 1]
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "HEAD":
            return
        with suppress(BrokenPipeError, ConnectionResetError):  # the client has left
            for start in range(0, len(part), PIECE):
                self.wfile.write(part[start : start + PIECE])
                self.wfile.flush()
                self.hub.sent[path] += len(part[start : start + PIECE])
            return
        self.close_connection = True


def entries(files, folder, recursive):
    """What the Hub lists of a folder: files and, without their content, folders."""
    start = f"{folder}/" if folder else ""
    listed = {}
    for path, content in files.items():
        if path.startswith(start):
            parts = path.removeprefix(start).split("/")
            for depth in range(1, len(parts)):
                name = start + "/".join(parts[:depth])
                listed[name] = {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
            oid = hashlib.sha1(content).hexdigest()
            listed[path] = {"type": "file", "path": path, "oid": oid, "size": len(content)}
    return [entry for path, entry in listed.items() if recursive or "/" not in path.removeprefix(start)]


@contextmanager
def serve():
    hub = Hub()
    handler = type("HubHandler", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield hub
        server.shutdown()
