"""A headless Chromium, driven over its own protocol."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",  # refused to root, whom containers run as
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """With a new and empty profile. Not for the whole session: as long as it lives an event loop
    runs in this thread, and tests that want one of their own fail."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab that fails its test for anything that the page's script or policy complains of."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    complaints: list[str] = []
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("console", lambda message: complaints.append(message.text))
    yield tab
    context.close()
    # What the browser itself says of answers that a test asks for.
    expected = ("Failed to load resource",)
    assert [text for text in complaints if not text.startswith(expected)] == []
