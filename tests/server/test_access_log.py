"""Lines of the access log."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from tests.server.live import QUESTION
from tests.waiting import wait_until
from vlmserve.errors import VLMServeError
from vlmserve.server.connection import RequestLog
from vlmserve.server.generation import Answer
from vlmserve.settings.config import ServerConfig


@pytest.fixture
def lines(caplog):
    """The access log's lines so far, once there are `count`."""
    caplog.set_level(logging.INFO, logger="vlmserve.access")

    def read(count: int = 1) -> list[logging.LogRecord]:
        def found() -> list[logging.LogRecord]:
            return [record for record in caplog.records if record.name == "vlmserve.access"]

        wait_until(lambda: len(found()) >= count)
        return found()

    return read


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": QUESTION, "model": "other"}, "model_not_found", "There is no model 'other' here"),
        ({"messages": QUESTION, "max_tokens": "x"}, "invalid_request", "max_tokens"),
    ],
)
def test_failed_requests_are_logged_with_their_reason(live, lines, body, code, reason):
    assert live.post(body).status_code in (400, 404)
    [record] = lines()
    assert f", {code}: " in record.getMessage()
    assert reason in record.getMessage()
    assert record.fields["error"] == code
    assert reason in record.fields["reason"]


def test_reasons_stay_on_one_short_line(live, lines):
    live.post({"messages": QUESTION, "model": "a\n12:00:00 forged" + "x" * 5000})
    [record] = lines()
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 500


def test_failed_streams_are_logged_with_their_reason(live, lines, monkeypatch):
    async def fails(self):
        raise VLMServeError("The engine tripped")
        yield

    monkeypatch.setattr(Answer, "deltas", fails)
    live.ask(stream=True)
    [record] = lines()
    assert "failed: The engine tripped" in record.getMessage()
    assert record.fields["reason"] == "The engine tripped"


def test_probes_are_logged_once_for_each_failure(lines):
    statuses = iter([503, 503, 503, 200, 200, 503, 200])

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": next(statuses), "headers": []})
        await send({"type": "http.response.body", "body": b""})

    class Front:
        metrics = None
        tracing = None
        config = ServerConfig()

    transport = httpx.ASGITransport(RequestLog(app, Front()))

    async def probe() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            for _ in range(7):
                await client.get("/health")

    asyncio.run(probe())
    assert [record.fields["status"] for record in lines()] == [503, 503]
