"""A server in a thread of the test, on a free port, and its engine in another one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from starlette.types import ASGIApp

from tests.engine_thread import EngineThread
from vlmserve.engine.process import EngineProcess
from vlmserve.frontend.client import EngineClient
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.server.app import create_app
from vlmserve.server.batches.runner import batches_running
from vlmserve.server.run import bind, default_sampling
from vlmserve.server.service import Service
from vlmserve.server.web import WebServer
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig

if TYPE_CHECKING:
    import anthropic

IN_BOTH_KINDS = pytest.mark.parametrize("keeping", ["sqlite", "postgresql"], indirect=True)
"""For tests of what is kept, and read again: in both kinds of database. The server does not know which it is; tests of
the storage know."""
QUESTION = [{"role": "user", "content": "What is in the picture?"}]


class LiveServer:
    """Use as a context manager. Call nothing of `service` that needs its event loop.

    process: the engine runs in a process of its own, for tests that kill it or look at the process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        engine: Any = None,
        media: Any = None,
        server: Any = None,
        process: bool = False,
        wrap: Callable[[ASGIApp, Service], ASGIApp] = lambda app, service: app,
    ) -> None:
        self._wrap = wrap
        self._launch = EngineProcess.launch if process else EngineThread
        self.folder = folder
        self._engine = EngineConfig(**{"model": str(folder), "engine": "mock", **(engine or {})})
        self._media = MediaConfig(**(media or {}))
        self.settings = ServerConfig(port=0, served_model_name="tiny", **(server or {}))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._up = threading.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> LiveServer:
        self._thread.start()
        self._up.wait(120)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            self.service = Service(self._engine, self._media, self.settings)
            web = WebServer(self._wrap(create_app(self.service), self.service), self.settings, bind(self.settings))
            self.url = web.url
            web.start()
            self.client = await EngineClient.start(self._engine, process=self._launch(self._engine, self.folder))
            preparer = RequestPreparer(self.folder, self._media, engine=self._engine)
            preparer.fit(self.client.info)
            self.service.open(self.client, preparer, default_sampling(self.folder))
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._up.set()
        async with batches_running(self.service):
            await self._stop.wait()
        await self.client.close()
        await web.stop()
        self.service.close()

    @functools.cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    @property
    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    @functools.cached_property
    def anthropic(self) -> anthropic.Anthropic:
        import anthropic  # takes seconds, which most test processes need not spend

        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    def post(self, body: Any = None, **kwargs: Any) -> httpx.Response:
        """POST to chat completions: `body` as JSON, or what httpx takes instead."""
        if body is not None:
            kwargs["json"] = body
        return httpx.post(f"{self.url}/v1/chat/completions", timeout=30, **kwargs)

    def ask(self, **fields: Any) -> httpx.Response:
        """POST a good question with these fields."""
        return self.post({"model": "tiny", "messages": QUESTION, **fields})


@contextlib.contextmanager
def stream_lines(url: str, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """The lines of a streaming answer; leaving closes the connection."""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=60) as response:
        response.raise_for_status()
        yield response.iter_lines()
