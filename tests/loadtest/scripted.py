"""A server that answers as a test says, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

Answering = Callable[[str, bytes, asyncio.StreamWriter], Awaitable[None]]

MODELS = {"data": [{"id": "scripted"}]}


@dataclass
class Scripted:
    """A running server. asked: the bodies of all completions."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0


def plain(status: str, body: bytes) -> bytes:
    """A whole answer."""
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def piece(text: str | None, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, **choice}]}


def stream(*events: object) -> bytes:
    """A whole stream at once."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(chunk(event(one)) for one in events) + b"0\r\n\r\n"


def answer(tokens: int = 2, prompt_tokens: int = 5) -> bytes:
    """A good stream."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
    pieces = [piece(f" {place}") for place in range(tokens)]
    return stream(*pieces, piece(None, finish_reason="stop"), {"choices": [], "usage": usage}, b"[DONE]")


@contextlib.asynccontextmanager
async def scripted(
    answering: Answering | None = None, tls: ssl.SSLContext | None = None, prefix: str = ""
) -> AsyncIterator[Scripted]:
    """A server on a free port. answering: what it writes to a completion, by default a good stream of two tokens.
    prefix: beginning of the paths that it answers."""
    server: Scripted
    serving: list[asyncio.Task[None]] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.ensure_future(serve(reader, writer)))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ")[1]
                length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0] or 0)
                body = await reader.readexactly(length)
                if path.startswith(f"{prefix}/v1/") and path.endswith("completions"):
                    server.asked.append(json.loads(body))
                    if answering is None:
                        writer.write(answer())
                    else:
                        await answering(head, body, writer)
                elif path == f"{prefix}/v1/models":
                    writer.write(plain("200 OK", json.dumps(MODELS).encode()))
                else:
                    writer.write(plain("404 Not Found", b"{}"))
                await writer.drain()
        writer.close()

    listening = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    port = listening.sockets[0].getsockname()[1]
    server = Scripted(f"{'https' if tls else 'http'}://127.0.0.1:{port}")
    try:
        yield server
    finally:
        listening.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def writes(*parts: bytes, close: bool = False) -> Answering:
    """Answers every request with these bytes, one write after another."""

    async def answering(head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.001)
        if close:
            writer.close()

    return answering
