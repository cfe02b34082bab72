"""What the client makes of answers, good and bad."""

from __future__ import annotations

import asyncio

import pytest

from tests.certificates import make_certificate
from tests.loadtest.scripted import answer, chunk, event, piece, plain, scripted, stream, writes
from vlmserve.errors import ConfigurationError
from vlmserve.loadtest.answer import Answer
from vlmserve.loadtest.client import Client, RequestFailedError
from vlmserve.types import Missed

PATH = "/v1/chat/completions"


async def ask(url: str, **options) -> Answer:
    client = Client(url, **{"timeout": 20.0, **options})
    reading = Answer(keeps_text=True)
    try:
        reading.check(await client.send(client.request("POST", PATH, [b"{}"]), reading.feed))
    finally:
        client.close()
    return reading


async def reason(answering, **options) -> tuple[str, str]:
    async with scripted(answering) as server:
        with pytest.raises(RequestFailedError) as failure:
            await ask(server.url, **options)
    return failure.value.reason, str(failure.value)


async def test_a_stream_is_read():
    async with scripted() as server:
        read = await ask(server.url)
    assert (read.text, read.num_tokens, read.num_prompt_tokens, len(read.times)) == (" 0 1", 2, 5, 2)
    assert read.times[0] <= read.times[1] <= read.ended


async def test_reasons_of_cache_misses_are_read():
    missed = {"never_seen": 7, "evicted": 2, "not_cacheable": 1, "seconds_since_eviction": 1.5}
    usage = {"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3, "missed_tokens": missed}}
    async with scripted(writes(stream(piece("a"), {"choices": [], "usage": usage}, b"[DONE]"))) as server:
        read = await ask(server.url)
    assert (read.cached_tokens, read.missed_tokens) == (3, Missed(7, 2, 0, 1, 1.5))


async def test_bytes_may_come_in_any_portions():
    data = answer(3)
    for size in (1, 7, 50):
        async with scripted(writes(*(data[at : at + size] for at in range(0, len(data), size)))) as server:
            read = await ask(server.url)
        assert (read.text, read.num_tokens) == (" 0 1 2", 3)


async def test_pieces_without_text_are_no_tokens():
    nothing = (piece(""), piece(None, delta={"role": "assistant", "tool_calls": None}))
    something = (piece("a"), piece(None, delta={"reasoning": "b"}), piece(None, delta={"tool_calls": [{"index": 0}]}))
    async with scripted(writes(stream(*nothing, *something, b"[DONE]"))) as server:
        read = await ask(server.url)
    assert len(read.times) == 3
    assert read.num_tokens is None


async def test_events_with_carriage_returns_and_comments_are_read():
    data = b": hello\r\n\r\n" + event(piece("a")).replace(b"\n", b"\r\n") + b"data: [DONE]\r\n\r\n"
    async with scripted(writes(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", data, close=True)) as server:
        assert (await ask(server.url)).text == "a"


async def test_events_without_content_are_skipped():
    nothing = [b"", {"choices": None}, {"choices": None, "usage": None}]
    events = [*nothing, piece("a"), *nothing, piece(None, finish_reason="stop")]
    async with scripted(writes(stream(*events, b"[DONE]"))) as server:
        assert (await ask(server.url)).text == "a"


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (
            "429 Too Many",
            b'{"error": {"message": "slow down", "type": "x", "code": "rate_limit"}}',
            "HTTP 429 rate_limit",
        ),
        (
            "400 Bad",
            b'{"object": "error", "message": "slow down", "type": "BadRequest", "code": 400}',
            "HTTP 400 BadRequest",
        ),
        ("502 Bad Gateway", b"<html>slow down</html>", "HTTP 502"),
    ],
)
async def test_errors_have_their_status_and_code(status, body, expected):
    found, message = await reason(writes(plain(status, body)))
    assert found == expected
    assert "slow down" in message


async def test_an_error_in_a_stream_is_one():
    error = {"error": {"message": "no memory", "code": "engine_dead"}}
    assert await reason(writes(stream(piece("a"), error))) == ("error in the stream engine_dead", "no memory")


async def test_streams_that_break_are_told_apart():
    half = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(event(piece("a")))
    assert (await reason(writes(half, close=True)))[0] == "connection closed"
    assert (await reason(writes(half + b"0\r\n\r\n")))[0] == "broken stream"
    assert (await reason(writes(half + chunk(b"data: {]\n\n"))))[0] == "broken stream"
    assert (await reason(writes(b"SSH-2.0-OpenSSH\r\n")))[0] == "not HTTP"


async def test_missing_answer_is_a_timeout():
    async def silence(head, body, writer):
        await asyncio.Event().wait()

    assert (await reason(silence, timeout=0.05))[0] == "timeout"


async def test_nobody_listens():
    async with scripted() as server:
        url = server.url
    with pytest.raises(RequestFailedError) as failure:
        await ask(url)
    assert failure.value.reason == "connection refused"


async def test_connections_are_kept_and_replaced():
    async with scripted() as server:
        client = Client(server.url)
        for _ in range(3):
            reading = Answer()
            reading.check(await client.send(client.request("POST", PATH, [b"{}"]), reading.feed))
        assert server.connections == 1
        client.close()


async def test_closed_kept_connection_costs_no_request():
    first = True

    async def once(head, body, writer):
        nonlocal first
        if first:
            writer.write(answer())
            first = False
            return
        first = True
        writer.close()  # without a byte, as when the request came too late

    async with scripted(once) as server:
        client = Client(server.url)
        for _ in range(2):
            reading = Answer()
            reading.check(await client.send(client.request("POST", PATH, [b"{}"]), reading.feed))
        assert server.connections == 2
        client.close()


async def test_tls_is_spoken_and_checked(tmp_path):
    context, _ = make_certificate(tmp_path)
    async with scripted(tls=context) as server:
        assert (await ask(server.url, insecure=True)).num_tokens == 2
        with pytest.raises(RequestFailedError) as failure:
            await ask(server.url)
    assert failure.value.reason == "TLS failed"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:0", "http://host:port"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigurationError, match="http://127"):
        Client(url)


def test_headers_cannot_break_out():
    with pytest.raises(ConfigurationError, match="line break"):
        Client("http://host", headers=[("X-A", "1\r\nX-B: 2")])
