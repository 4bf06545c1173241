"""The server of the page. It answers this machine alone, and lets one model compute at a time.

GET / is the page, GET /runs the runs as JSON, GET /report the report of the ablation that they belong to. POST /prompt
streams a row of JSON per token; the other questions are answered with JSON. A refusal is {"error": LINE} with a status
from 400 on.
"""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lm.config import build
from lm.decoding import Sampling
from lm.errors import DAMAGE, UserError, first_line, require, require_seed
from lm.lab.look.runs import LoadedModel, described_run, load
from lm.lab.look.views import attention, continuations, opening, scored_text
from lm.lab.report.figures import INK, line_styles
from lm.lab.report.pages import render, script_hash
from lm.training.run_directory import METRICS

ADDRESS = "127.0.0.1"
MAX_MODELS = 2  # in a question
LOADED = 4  # models in memory
MODEL_FILES = ("config.json", "model/config.json")  # what is there of them changes with the model
RUN_FILES = ("config.yaml", METRICS, "result.json", *MODEL_FILES)
log = logging.getLogger(__name__)


# --- what may be asked


@dataclass(kw_only=True)
class _Question:
    runs: list[str]  # their names, as GET /runs has them

    def __post_init__(self) -> None:
        are_names = all(isinstance(name, str) for name in self.runs)
        require(
            are_names and 1 <= len(self.runs) <= MAX_MODELS, f"runs={self.runs}", f"1 to {MAX_MODELS} names of runs"
        )


@dataclass(kw_only=True)
class _Prompt(_Question):
    prompt: str = ""
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def answer(self, models: list[LoadedModel]) -> Iterator[dict[str, Any]]:
        require_seed(self.seed)
        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)
        return continuations(models, self.prompt, self.max_new_tokens, sampling)


@dataclass(kw_only=True)
class _Text(_Question):
    text: str = ""  # empty: the validation text of the first run
    passage: int = 0

    def answer(self, models: list[LoadedModel]) -> dict[str, Any]:
        return scored_text(models, self.text, self.passage)


@dataclass(kw_only=True)
class _Attention(_Question):
    text: str = ""
    position: int | None = None  # of the token that attends; null: the last one

    def answer(self, models: list[LoadedModel]) -> dict[str, Any]:
        return attention(models[0], self.text, self.position)


@dataclass(kw_only=True)
class _Opening(_Question):
    def answer(self, models: list[LoadedModel]) -> dict[str, Any]:
        return opening(models[0])


KINDS = (_Prompt, _Text, _Attention, _Opening)
QUESTIONS = {kind.__name__.lower().replace("_", "/"): kind for kind in KINDS}  # by their addresses


class _Refusal(Exception):
    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


# --- the server


class LookServer(ThreadingHTTPServer):
    """`places` gives the runs that there are now, by name. `folder` is their ablation's, if there is one."""

    def __init__(
        self,
        places: Callable[[], dict[str, Path]],
        port: int = 0,
        classes: Sequence[str] = (),
    ) -> None:
        super().__init__((ADDRESS, port), _Handler)
        self.places = places
        self.lock = threading.Lock()  # held while a model computes
        self.names: dict[str, None] = {}  # in the order of their appearance, which gives a run its colour
        self.described = lru_cache(maxsize=4096)(lambda name, path, _: described_run(name, path))
        self.loaded = lru_cache(maxsize=LOADED)(lambda name, path, _: load(name, path, classes))

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def runs(self) -> dict[str, Any]:
        places = self.places()
        self.names |= dict.fromkeys(places)
        styles, rows = line_styles([*self.names]), []
        for name, path in places.items():
            stamp = _stamp(path, (*RUN_FILES, f"../{path.name}.json"))  # that of an ablation
            row = self.described(name, path, stamp)
            color = styles[name].color.replace(INK, "var(--ink)")
            rows.append(row | {"color": color, "dashes": styles[name].linestyle})
        return {"runs": rows}

    def models(self, names: list[str]) -> list[LoadedModel]:
        places = self.places()
        for name in names:
            require(name in places, f"run={name}", "the name of a listed run")
        return [self.loaded(name, places[name], _stamp(places[name], MODEL_FILES)) for name in names]


def _stamp(folder: Path, names: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Return a value that changes when one of these files does."""
    stats = (path.stat() for name in names if (path := folder / name).exists())
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)


@lru_cache(maxsize=1)
def _page() -> tuple[bytes, str]:
    """Return the page, and a policy under which only its own script runs."""
    text = render("look.html.j2", title="Look at runs")
    policy = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        policy += [f"{tag}-src 'sha256-{script_hash(content)}'"]
    return text.encode(), "; ".join([*policy, "frame-ancestors 'none'"])


class _Handler(BaseHTTPRequestHandler):
    server: LookServer
    timeout = 20  # seconds without a byte
    error_content_type, error_message_format = "text/plain", "%(message)s\n"  # of what http.server itself refuses

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, respond: Callable[[], None]) -> None:
        """Respond, and turn every error into a line."""
        self.streaming = False
        try:
            self._check_origin()
            respond()
        except _Refusal as error:
            self._fail(error.status, str(error))
        except ConnectionError:  # the page has been closed
            pass
        except (UserError, OSError) as error:
            self._fail(400, str(error))
        except Exception as error:
            log.exception("%s", self.path)
            self._fail(500, f"a fault of the program: {type(error).__name__}; its terminal shows more")

    def _check_origin(self) -> None:
        """Refuse the requests of pages of other sites, which may come under a name of theirs or from their origin."""
        hosts = [f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")]
        if (host := self.headers.get("Host")) not in hosts:
            raise _Refusal(403, f"Host: {host}: expected {hosts[0]}")
        if (origin := self.headers.get("Origin")) not in (None, *(f"http://{host}" for host in hosts)):
            raise _Refusal(403, f"Origin: {origin}: expected {self.server.address}")

    def _get(self) -> None:
        if self.path == "/":
            self._head(200, "text/html; charset=utf-8")
            self.wfile.write(_page()[0])
        elif self.path == "/runs":
            self._json(200, self.server.runs())
        else:
            raise _Refusal(404, f"{self.path}: no such address")

    def _post(self) -> None:
        if self.path not in QUESTIONS:
            raise _Refusal(404, f"{self.path}: no such address")
        question = self._question(QUESTIONS[self.path])
        with self.server.lock:
            answer = question.answer(self.server.models(question.runs))
        if isinstance(answer, Iterator):
            self._stream(answer)
        else:
            self._json(200, answer)

    def _question(self, kind: Any) -> Any:
        try:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            own = content if isinstance(content, dict) else {}
            texts = {key: own.pop(key) for key in ("prompt", "text") if isinstance(own.get(key), str)}
            return replace(build(kind, content), **texts)  # a text that is "???" is no missing value
        except UserError:
            raise
        except DAMAGE as error:
            raise _Refusal(400, f"not a question ({type(error).__name__}: {first_line(error)})") from error

    def _stream(self, rows: Iterator[dict[str, Any]]) -> None:
        row: dict[str, Any] | None = {}
        while row is not None:
            with self.server.lock:  # another page gets its turn after each token
                row = next(rows, None)
            self._row({"end": ""} if row is None else row)

    def _row(self, row: Any) -> None:
        """Send a line of a stream. The first line opens the stream: until then, a refusal has a status of its own."""
        if not self.streaming:
            self._head(200, "application/x-ndjson")
        self.streaming = True
        self.wfile.write(json.dumps(row, allow_nan=False).encode() + b"\n")

    def _fail(self, status: int, error: str) -> None:
        content = {"error": " ".join(error.split())}
        with suppress(OSError):  # nobody reads it
            self._row(content) if self.streaming else self._json(status, content)

    def _json(self, status: int, content: Any) -> None:
        text = json.dumps(content, allow_nan=False).encode()
        self._head(status, "application/json")
        self.wfile.write(text)

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", _page()[1])
        self.send_header("Cache-Control", "no-store")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing: a line for each request would hide what matters."""
