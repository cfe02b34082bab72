"""A browser, and servers for it to look at. Whoever lacks Chromium or Playwright is told so and tests the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import LiveServer
from tests.web.browser import ARGUMENTS, find_chromium
from vlmserve.models.hub import resolve_model

PATIENCE_MS = 30_000
"""More than a browser takes on a busy machine."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Of a module, since tests that have an event loop of their own cannot run while Playwright does."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test installs it")
    path = find_chromium()
    if path is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    playwright.expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def pixie() -> Iterator[LiveServer]:
    """The built-in model, which takes images."""
    engine = {"engine": "real", "device": "cpu", "kv_cache_memory": "8MiB", "num_threads": 1}
    server = {"storage_url": "memory", "max_body_bytes": 300_000}
    with LiveServer(resolve_model("pixie"), engine=engine, server=server) as running:
        yield running


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Long answers, a word every 30 ms."""
    folder = make_mock_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    with LiveServer(folder, engine={"mock_tpot": 0.03}, server={"storage_url": "memory"}) as running:
        yield running


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a server's page in a browser that has never seen it. What a browser complains of fails the test.

    complains: a pattern of what it may complain of, since the test breaks it.
    """
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_page(server: LiveServer, path: str = "/", *, complains: str = "", **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)

        def note(text: str) -> None:
            if not complains or not re.search(complains, text):
                complaints.append(text)

        page.on("console", lambda message: note(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: note(str(error)))
        page.on("request", lambda request: None if _is_own(request.url, server.url) else note(request.url))
        page.goto(server.url + path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def _is_own(url: str, server_url: str) -> bool:
    return url.startswith((f"{server_url}/", "data:", f"blob:{server_url}/"))
