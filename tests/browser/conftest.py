"""A Chromium for tests of pages; without one they are skipped and say so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, sync_playwright

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
# No sandbox: tests run as root in containers. The rest keeps the browser from calling home.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the pages of a module: while Playwright is there, its event loop runs in this thread."""
    if CHROMIUM is None:
        pytest.skip("No Chromium on PATH: install one, for instance `apt-get install chromium`.")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        except Error as error:
            pytest.skip(f"{CHROMIUM} does not start: {str(error)[:200]}")
        yield browser
        browser.close()


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """Where a test puts what it saw, to be looked at."""
    path = tmp_path / "shots"
    path.mkdir()
    return path
