"""One browser for the tests of pages, and pages opened in it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium; tests that need it are skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Open the text of a page; `noise` is what it then says and asks for."""
    folder = tmp_path_factory.mktemp("pages")

    def open_page(name: str, text: str, drawn: bool = True) -> Any:
        path = folder / f"{name}.html"
        path.write_text(text, encoding="utf-8")
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.noise = []
        page.on("console", lambda message: page.noise.append(message.text))
        page.on("pageerror", lambda error: page.noise.append(str(error)))
        page.on("request", lambda request: page.noise.append(request.url))
        page.goto(path.as_uri())
        if drawn:
            page.locator("html[data-drawn=true]").wait_for()
        page.noise.remove(path.as_uri())
        return page

    return open_page
