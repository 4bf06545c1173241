"""A page of a real headless browser: Chromium or Chrome of this machine, or the one that Playwright has installed."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def browser_page():
    """A page that fails the test at its end if a script on it raised an error. Skips the test without a browser."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, an extra of `dev`")
    with api.sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, NAMES)), None) or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("needs Chromium or Chrome; `playwright install chromium` gets one")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        browser.close()
        assert not errors
