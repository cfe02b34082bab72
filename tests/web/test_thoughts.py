"""Thoughts on the chat page: folded, and kept with their answers."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import LiveServer
from tests.thinking_checkpoint import teach_thoughts

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test installs it")

from playwright.sync_api import Page, expect

from tests.web.page import answer_of, answers, ask
from tests.web.test_chat import conversation_of, keep_on_server


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose model thinks."""
    folder = teach_thoughts(make_mock_checkpoint(tmp_path_factory.mktemp("checkpoint")))
    with LiveServer(folder, server={"storage_url": "memory"}) as running:
        yield running


def expected(server: LiveServer, question: str) -> tuple[str, str]:
    """Thoughts and answer, as the API has them."""
    body = {"messages": [{"role": "user", "content": question}]}
    message = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]
    return message["reasoning_content"], message["content"]


def check(page: Page, index: int, thoughts: str, text: str) -> None:
    """An answer is shown with its thoughts folded, and a click shows these."""
    assert answer_of(page, index).split() == text.split()
    answer = answers(page).nth(index)
    shown = answer.get_by_text(thoughts, exact=True)
    expect(shown).to_be_hidden()
    answer.get_by_text("Thoughts").click()
    expect(shown).to_be_visible()


def test_reasoning_is_folded_and_survives_a_reload(thinker, visit):
    page = visit(thinker)
    ask(page, "What is there?")
    check(page, 0, *expected(thinker, "What is there?"))
    page.reload()
    check(page, 0, *expected(thinker, "What is there?"))
    ask(page, "And why?")
    assert answer_of(page, 1)
    expect(page.get_by_text("Thoughts", exact=True)).to_have_count(2)


def test_server_stores_reasoning_with_its_answer(thinker, visit):
    page = visit(thinker)
    keep_on_server(page)
    ask(page, "What is there?")
    assert answer_of(page, 0)
    page.get_by_role("button", name="Answer again").click()
    expect(answers(page)).to_have_count(1)
    page.reload()
    assert answer_of(page, 0)
    answers(page).nth(0).get_by_text("Thoughts").click()
    url = f"{thinker.url}/v1/conversations/{conversation_of(page)}/items?order=asc"
    kinds = [item["type"] for item in httpx.get(url, timeout=60).json()["data"]]
    assert kinds == ["message", "reasoning", "message"]
