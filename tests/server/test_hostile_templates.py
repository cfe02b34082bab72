"""A chat template that takes long for some conversations, and other conversations meanwhile."""

from __future__ import annotations

import base64
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.media.documents_for_tests import page, pdf_file, square
from tests.mock_checkpoint import make_mock_checkpoint
from tests.prompt.test_template_limits import WHEN_LONG
from tests.server.live import QUESTION, LiveServer
from tests.waiting import wait_until
from vlmserve.media.documents import DocumentReader, Page
from vlmserve.prompt import template_limits
from vlmserve.prompt.template import ChatTemplate
from vlmserve.server.fair_queue import FairQueue

SLOW = [{"role": "user" if place % 2 == 0 else "assistant", "content": "Hi"} for place in range(9)]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = make_mock_checkpoint(tmp_path_factory.mktemp("hostile"), context=10_000)
    (folder / "chat_template.jinja").write_text(WHEN_LONG)
    with LiveServer(folder) as running:
        yield running


def test_slow_renderings_hold_up_no_other_request(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(template_limits, "REDUCED_SECONDS", 0.2)
    refusals: list[httpx.Response] = []
    bodies = [{"messages": SLOW}, {"messages": SLOW, "tools": [TOOL]}, {"messages": [*SLOW[:8], long_text()]}]

    def attack(body: dict) -> None:
        refusals.append(httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300))

    attacks = [threading.Thread(target=attack, args=(body,)) for body in bodies * 2]
    for thread in attacks:
        thread.start()
    honest = [{"messages": QUESTION}, {"messages": QUESTION, "tools": [TOOL]}, {"messages": [long_text()]}]
    refused = []
    for body in honest:
        assert server.post({**body, "max_tokens": 1}).status_code == 200
        refused.append(len(refusals))
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    assert refused[0] < len(attacks) - 1  # it did not wait for the slow ones
    for thread in attacks:
        thread.join(300)
    assert [refusal.status_code for refusal in refusals] == [400] * len(attacks)
    assert all("takes longer than" in refusal.text for refusal in refusals)


def long_text() -> dict[str, str]:
    """A message that is prepared in a thread."""
    return {"role": "user", "content": "word " * 600}


def test_slow_renderings_leave_media_to_their_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are opened once, and slow threads neither fetch nor decode."""
    monkeypatch.setattr(template_limits, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(template_limits, "CHECK_INTERVAL", 1)
    events: list[str] = []

    def spy(owner: type, name: str, event: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            events.append(f"{event} in {threading.current_thread().name.rpartition('_')[0]}")
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    spy(DocumentReader, "pages", "open")
    spy(Page, "prepare", "decode")
    spy(ChatTemplate, "render", "render")
    with LiveServer(make_mock_checkpoint(tmp_path)) as server:
        monkeypatch.setattr(server.service.preparation.memory, "worked", lambda: events.append("worked"))
        data = base64.b64encode(pdf_file([page(square("1 0 0"))])).decode()
        document = {"type": "file", "file": {"file_data": data}}
        response = server.post({"messages": [{"role": "user", "content": [document]}], "max_tokens": 1})
    assert response.status_code == 200
    quick = ["open in prepare-files", "render in prepare-files", "worked"]
    assert events == [*quick, "render in prepare-slow-text", "decode in prepare-files", "worked"]


def test_documents_waiting_for_slow_templates_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(template_limits, "CHECK_INTERVAL", 1)
    ends, begun, held = threading.Event(), threading.Event(), weakref.WeakSet[Page]()
    make, render = Page.__init__, ChatTemplate.render

    def make_page(page: Page, *arguments: Any) -> None:
        make(page, *arguments)
        held.add(page)

    def render_slowly(*arguments: Any, **options: Any) -> str:
        if threading.current_thread().name.startswith("prepare-slow-text"):
            begun.set()
            assert ends.wait(60)
        return render(*arguments, **options)

    acquire, waiting = FairQueue.acquire, list[FairQueue]()

    async def acquire_and_note(queue: FairQueue) -> str:
        waiting.append(queue)
        try:
            return await acquire(queue)
        finally:
            waiting.remove(queue)

    def num_waiting() -> int:
        """Documents whose template is slow. Threads have queues of another class."""
        return sum(type(queue) is FairQueue for queue in waiting)

    monkeypatch.setattr(FairQueue, "acquire", acquire_and_note)
    monkeypatch.setattr(Page, "__init__", make_page)
    monkeypatch.setattr(ChatTemplate, "render", render_slowly)

    def asked(color: str) -> dict[str, Any]:
        """A question about a document of its own: equal pages are one in a set."""
        data = base64.b64encode(pdf_file([page(square(color))])).decode()
        document = {"type": "file", "file": {"file_data": data}}
        return {"messages": [{"role": "user", "content": [document]}], "max_tokens": 1}

    with (
        LiveServer(make_mock_checkpoint(tmp_path), media={"media_processes": 1}) as server,
        ThreadPoolExecutor(3) as threads,
    ):
        answers = [threads.submit(server.post, asked(color)) for color in ("1 0 0", "0 1 0", "0 0 1")]
        wait_until(lambda: begun.is_set() and num_waiting() == 2)
        gc.collect()
        num_held = len(held)
        ends.set()
        assert [answer.result().status_code for answer in answers] == [200] * 3
        assert num_held == 1
        assert num_waiting() == 0
        assert server.post(asked("1 0 0")).status_code == 200, "their places are free"
