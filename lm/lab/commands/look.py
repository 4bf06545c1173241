"""Look at runs in a browser: lm-lab look run_dir=RUN, run_dir=[RUN1,RUN2] or folder=runs

The command prints the address of a page on this machine alone, and opens the page in the browser if there is one. The
page shows continuations token by token with their candidates, what each head attends to, the loss of each token of a
text, and the runs with their curves, also while they train. Ctrl-C ends the command.
"""

import os
import webbrowser
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lm.cli.arguments import parse, split_words, with_folders
from lm.data.paths import listed
from lm.errors import UserError, check_settings, expand_paths, require
from lm.folder import RUN_MARKS, folders_with, newest_run


@dataclass(slots=True, kw_only=True)
class LookConfig:
    run_dir: str | None = None  # runs to look at, [RUN1,RUN2] or a glob; null: runs below the folder
    folder: str = "runs"  # folder that holds runs at any depth, and may still be empty
    port: int = 0  # port of the page on this machine; 0: a free port
    open: bool = True  # whether the page is opened in the browser, if there is one
    threads: int | None = None  # threads of torch; null: OMP_NUM_THREADS, else all cores
    classes: list[str] | None = None  # dotted paths of classes of your own that a model may use

    def __post_init__(self) -> None:
        expand_paths(self, "run_dir", "folder")
        require(self.port == 0 or 1024 <= self.port < 2**16, f"port={self.port}", "0, or 1024 to 65535")
        check_settings("", self, "threads")


SCHEMA = LookConfig


def run(args: list[str]) -> None:
    config = parse(LookConfig, _with_words(args))
    folder = Path(config.folder)
    names = [] if config.run_dir is None else listed(config.run_dir, "run_dir", folders=True)
    for name in names:
        if not Path(name).is_dir():
            raise UserError(f"run_dir={name}: no such folder; expected a run directory that train wrote")
    if not names and not folder.is_dir():
        raise UserError(f"folder={folder}: no such folder; expected a folder that holds runs")
    from lm.lab.look.server import LookServer
    from lm.system.device import set_threads

    def places() -> dict[str, Path]:
        if names:
            return {name: Path(name) for name in names}
        runs = folders_with(RUN_MARKS, folder)
        return dict(sorted(runs.items(), key=lambda item: item[1] != first))  # the page opens with the first one

    first = None if names else newest_run(folder)
    set_threads(config.threads)
    try:
        server = LookServer(places, config.port, config.classes or [])
    except OSError as error:
        raise UserError(f"port={config.port}: {error.strerror}; port=0 takes one that is free") from error
    print(f"{server.address}  Ctrl-C ends it", flush=True)
    if config.open:
        _open(server.address)
    try:
        server.serve_forever()
    finally:
        server.lock.acquire(timeout=5)  # no model computes while the process ends
        server.server_close()


def _with_words(args: list[str]) -> list[str]:
    """Return the settings, with the folders that words name: runs, or a folder that holds runs. Raises UserError."""
    words, settings = split_words(args, LookConfig)
    has_run = any(os.path.exists(f"{word}/{name}") for word in words for name in (*RUN_MARKS, "config.json"))
    return with_folders(words, settings, "run_dir" if has_run else "folder")


def _open(address: str) -> None:
    """Open a browser with a window. A browser for terminals would take this terminal, so the user must ask for it."""
    with suppress(webbrowser.Error):
        browser = webbrowser.get()
        if "BROWSER" in os.environ or type(browser) is not webbrowser.GenericBrowser:
            browser.open(address)
