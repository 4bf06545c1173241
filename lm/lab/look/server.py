"""The server of the page. It answers this machine alone, and lets one model compute at a time.

GET / is the page, and GET /runs the runs. A question is a POST. An answer is a line of JSON; /prompt answers with a
line for each token and a last line. A refusal is {"error": LINE} with the status 400.
"""

import json
import logging
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
from lm.errors import UserError, reading, require
from lm.lab.look.runs import LoadedModel, described_run, load
from lm.lab.look.views import attention, continuations, opening, scored_text
from lm.lab.report.figures import INK, line_styles
from lm.lab.report.pages import render
from lm.training.run_directory import METRICS

ADDRESS = "127.0.0.1"
MAX_MODELS = 2  # in a question
LOADED = 4  # models in memory
MODEL_FILES = ("config.json", "model/config.json")  # what is there of them changes with the model
RUN_FILES = ("config.yaml", METRICS, "result.json", *MODEL_FILES)
PAGE = {  # by their addresses
    "/": ("look.html.j2", "text/html"),
    "/look.css": ("look.css.j2", "text/css"),
    "/look.js": ("look.js.j2", "text/javascript"),
}
# The page runs its own script alone, and asks no other place.
POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
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
        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)
        yield from continuations(models, self.prompt, self.max_new_tokens, sampling)
        yield {"end": True}  # without this row, a connection that breaks would look like the end


@dataclass(kw_only=True)
class _Text(_Question):
    text: str = ""  # empty: the validation text of the first run
    passage: int = 0

    def answer(self, models: list[LoadedModel]) -> Iterator[dict[str, Any]]:
        yield scored_text(models, self.text, self.passage)


@dataclass(kw_only=True)
class _Attention(_Question):
    text: str = ""
    position: int | None = None  # of the token that attends; null: the last one

    def answer(self, models: list[LoadedModel]) -> Iterator[dict[str, Any]]:
        yield attention(models[0], self.text, self.position)


@dataclass(kw_only=True)
class _Opening(_Question):
    def answer(self, models: list[LoadedModel]) -> Iterator[dict[str, Any]]:
        yield opening(models[0])


KINDS = (_Prompt, _Text, _Attention, _Opening)
QUESTIONS = {kind.__name__.lower().replace("_", "/"): kind for kind in KINDS}  # by their addresses


# --- the server


class LookServer(ThreadingHTTPServer):
    """`places` gives the runs that there are now, by name."""

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
            stamp = _stamp(path, (*RUN_FILES, f"../{path.name}.json"))  # the last file is of an ablation
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
        self.has_begun = False
        try:
            self._check_origin()
            respond()
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
        host, origin = self.headers.get("Host"), self.headers.get("Origin")
        require(host in hosts, f"Host: {host}", hosts[0])
        require(origin in (None, *(f"http://{host}" for host in hosts)), f"Origin: {origin}", self.server.address)

    def _get(self) -> None:
        if self.path == "/runs":
            self._send(self.server.runs())
            return
        require(self.path in PAGE, self.path, "an address of the page")
        template, kind = PAGE[self.path]
        self._head(200, f"{kind}; charset=utf-8")
        self.wfile.write(render(template).encode())

    def _post(self) -> None:
        require(self.path in QUESTIONS, self.path, "an address of the page")
        with reading(Path(self.path), "a question"):
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            own = content if isinstance(content, dict) else {}
            texts = {key: own.pop(key) for key in ("prompt", "text") if isinstance(own.get(key), str)}
            question: Any = replace(build(QUESTIONS[self.path], content), **texts)  # "???" is no missing value
        with self.server.lock:
            rows = question.answer(self.server.models(question.runs))

        def following() -> dict[str, Any] | None:
            with self.server.lock:  # another page gets its turn after each row
                return next(rows, None)

        for row in iter(following, None):
            self._send(row)

    def _fail(self, status: int, error: str) -> None:
        with suppress(OSError):  # nobody reads it
            self._send({"error": " ".join(error.split())}, status)

    def _send(self, row: Any, status: int = 200) -> None:
        """Send a line of an answer. The first line begins the answer: until then, a refusal has a status of its own."""
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        if not self.has_begun:
            self._head(status, "application/json")
        self.has_begun = True
        self.wfile.write(line)

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing: a line for each request would hide what matters."""
