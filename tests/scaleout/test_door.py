"""A worker learns from its gateway who asks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from vlmserve.scaleout.door import Door
from vlmserve.scaleout.messages import CLIENT_HEADER, TOKEN_HEADER


@pytest.mark.parametrize(
    ("headers", "host"), [({CLIENT_HEADER: "203.0.113.7"}, "203.0.113.7"), ({}, "127.0.0.1")], ids=["told", "not told"]
)
def test_request_has_the_address_of_the_gateways_client(headers: dict[str, str], host: str) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> None:
        door = Door(app, cast(Any, SimpleNamespace()), name="a", token="b", capacity=1)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://worker") as http:
            await http.post("/v1/chat/completions", headers={TOKEN_HEADER: "b", **headers})

    asyncio.run(ask())
    assert seen == [host]
