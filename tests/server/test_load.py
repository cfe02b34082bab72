"""Many clients at once, of which some leave and some read slowly, against a server in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.server.live import QUESTION
from tests.waiting import wait_until

CLIENTS = 250
NEW_TOKENS = 20
GROWTH_BYTES = CLIENTS * 300_000
"""Of the server's memory for all streams at once."""


@pytest.fixture(scope="module")
def many_files() -> Iterator[None]:
    """This process holds a socket for each client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CLIENTS * 3
    if soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            pytest.skip(f"only {hard} files may be open, and {wanted} are needed")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def server(folder, many_files) -> Iterator[tuple[str, psutil.Process]]:
    command = [
        sys.executable, "-m", "vlmserve", "serve", str(folder), "--engine", "mock", "--port", "0",
        "--served-model-name", "tiny", "--max-num-seqs", str(CLIENTS), "--mock-tpot", "0.01", "--enable-debug",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    ready = next(found for line in process.stdout if (found := re.search(r"ready: (http\S+)", line)))
    yield ready[1], psutil.Process(process.pid)
    process.terminate()
    process.wait()
    process.stdout.close()


def request(url: str, **fields: object) -> bytes:
    body = json.dumps({"model": "tiny", "messages": QUESTION, "ignore_eos": True, "stream": True, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    return await asyncio.open_connection(address.hostname, address.port)


async def stream(url: str, **fields: object) -> str:
    """The text of a streamed answer. Fails unless it is whole."""
    reader, writer = await connect(url)
    try:
        writer.write(request(url, **fields))
        answer = (await reader.read()).decode()
    finally:
        writer.close()
    assert answer.startswith("HTTP/1.1 200"), answer
    assert "data: [DONE]" in answer, answer
    events = [json.loads(event) for event in re.findall(r"^data: (\{.*\})\r?$", answer, re.MULTILINE)]
    assert not any("error" in event for event in events)
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


def is_idle(url: str) -> bool:
    return not httpx.get(f"{url}/debug/cache").json()["requests"]


async def test_hundreds_of_streams_all_end_well(server) -> None:
    url, process = server
    texts = await asyncio.gather(*(stream(url, max_tokens=NEW_TOKENS, temperature=0) for _ in range(50)))
    before = process.memory_info().rss
    texts += await asyncio.gather(*(stream(url, max_tokens=NEW_TOKENS, temperature=0) for _ in range(CLIENTS)))
    assert len(set(texts)) == 1
    assert texts[0]
    assert process.memory_info().rss - before < GROWTH_BYTES
    assert is_idle(url)


async def leave(url: str, draw: random.Random) -> None:
    """Ask, and be gone at some time before the end."""
    reader, writer = await connect(url)
    data = request(url, max_tokens=500, stream=draw.random() < 0.7)
    # Some leave in the middle of what they say.
    writer.write(data[: draw.randrange(len(data))] if draw.random() < 0.2 else data)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reader.read(), draw.random())
    writer.transport.abort()


async def test_clients_leaving_anytime_leave_nothing_behind(server) -> None:
    url, process = server
    draw = random.Random(0)
    files = process.num_fds()
    staying = asyncio.gather(*(stream(url, max_tokens=NEW_TOKENS) for _ in range(20)))
    await asyncio.gather(*(leave(url, draw) for _ in range(200)))
    assert all(await staying)
    wait_until(lambda: is_idle(url))
    wait_until(lambda: process.num_fds() <= files + 2)
    assert await stream(url, max_tokens=2)


async def test_slow_readers_slow_nobody_else(server) -> None:
    """They read nothing, and what they asked for is more than a socket holds."""
    url, _ = server
    slow = [await connect(url) for _ in range(3)]
    for _, writer in slow:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(request(url, max_tokens=400, n=16))
    texts = await asyncio.wait_for(
        asyncio.gather(*(stream(url, max_tokens=NEW_TOKENS, temperature=0) for _ in range(50))), 60
    )
    assert len(set(texts)) == 1
    # Whatever the clients do, the engine finishes and forgets their answers.
    wait_until(lambda: is_idle(url))
    for _, writer in slow:
        writer.transport.abort()
    assert await stream(url, max_tokens=2)
