"""Look at runs in a browser: lm-lab look run_dir=RUN, run_dir=[RUN1,RUN2] or folder=runs

A page on an address of this machine alone, which is printed and opened in the browser if there is one: continuations
token by token with their candidates, the loss of each token of a text, neighbours and norms of the embeddings, and
the runs with their curves, also while they train. Ctrl-C ends it.
"""

import os
import webbrowser
from contextlib import suppress
from pathlib import Path

from lm.cli.compose import parse
from lm.config import UserError
from lm.config.commands import LookConfig
from lm.data.paths import listed
from lm.runs.find import MARKS, folders_with

SCHEMA = LookConfig


def run(args: list[str]) -> None:
    config = parse(LookConfig, args)
    folder = Path(config.folder)
    names = [] if config.run_dir is None else listed(config.run_dir, "run_dir", folders=True)
    for name in names:
        if not Path(name).is_dir():
            raise UserError(f"run_dir={name}: no such folder; expected a run directory that train wrote")
    if not names and not folder.is_dir():
        raise UserError(f"folder={folder}: no such folder; expected a folder that holds runs")
    from lm.look.server import LookServer
    from lm.system.device import set_threads

    def places() -> dict[str, Path]:
        return {name: Path(name) for name in names} or folders_with(MARKS, folder)

    set_threads(config.threads)
    try:
        server = LookServer(places, config.port, config.trust)
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


def _open(address: str) -> None:
    """In a browser with a window: one for terminals would take this one, unless the user has asked for it."""
    with suppress(webbrowser.Error):
        browser = webbrowser.get()
        if "BROWSER" in os.environ or type(browser) is not webbrowser.GenericBrowser:
            browser.open(address)
