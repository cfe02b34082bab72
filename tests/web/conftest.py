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
    server = {"storage_url": "memory", "max_body_bytes": 2_000_000}
    with LiveServer(resolve_model("pixie"), engine=engine, server=server) as running:
        yield running


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Long answers, a word every 30 ms."""
    folder = make_mock_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    with LiveServer(folder, engine={"mock_tpot": 0.03}, server={"storage_url": "memory"}) as running:
        yield running


class Tab:
    """A page in a browser that has seen nothing else. Once forgotten, it is reused for the same server and options.

    A new one takes longer than most of what tests do with it.
    """

    def __init__(self, browser: Any, server: LiveServer, options: dict[str, Any]) -> None:
        self.key = server.url, repr(options)
        self._origin = server.url
        self._context = browser.new_context(**options)
        self.page = self._context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self._size = self.page.viewport_size
        self._complaints: list[str] = []
        self._ignored = ""
        self.page.on("console", lambda message: self._note(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self._note(str(error)))
        self.page.on("request", lambda sent: None if _is_own(sent.url, self._origin) else self._note(sent.url))

    def open(self, path: str, ignored: str) -> None:
        """Go to a page of the server. ignored: a pattern of complaints."""
        self._ignored = ignored
        self.page.goto(self._origin + path)

    def forget(self) -> list[str]:
        """Leave the page and delete what it has stored. Returns what the browser complained of."""
        self.page.unroute_all(behavior="ignoreErrors")
        self.page.goto("about:blank")
        complaints, self._complaints = self._complaints, []
        session = self._context.new_cdp_session(self.page)
        session.send("Storage.clearDataForOrigin", {"origin": self._origin, "storageTypes": "all"})
        session.detach()
        self._context.clear_permissions()
        self.page.set_viewport_size(self._size)
        return complaints

    def _note(self, text: str) -> None:
        if not self._ignored or not re.search(self._ignored, text):
            self._complaints.append(text)


@pytest.fixture(scope="module")
def idle_tabs(browser: Any) -> list[Tab]:
    """Tabs that no test uses."""
    return []


@pytest.fixture
def visit(browser: Any, idle_tabs: list[Tab]) -> Iterator[Callable[..., Any]]:
    """Opens a server's page in a browser that has never seen it. What a browser complains of fails the test.

    complains: a pattern of what it may complain of, since the test breaks it.
    """
    used: list[Tab] = []

    def open_page(server: LiveServer, path: str = "/", *, complains: str = "", **options: Any) -> Any:
        key = server.url, repr(options)
        tab = next((tab for tab in idle_tabs if tab.key == key), None)
        if tab is None:
            tab = Tab(browser, server, options)
        else:
            idle_tabs.remove(tab)
        used.append(tab)
        tab.open(path, complains)
        return tab.page

    yield open_page
    complaints = [complaint for tab in used for complaint in tab.forget()]
    idle_tabs += used
    assert complaints == []


def _is_own(url: str, server_url: str) -> bool:
    return url.startswith((f"{server_url}/", "data:", f"blob:{server_url}/"))
