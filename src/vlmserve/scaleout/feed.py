from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from vlmserve.scaleout.messages import FEED_PATH, ROUTE_HEADER, FeedMessage
from vlmserve.scaleout.upstream import Upstream, UpstreamError

_SILENCE = 3.0
"""Seconds of silence after which a worker counts as dead."""


async def follow(upstream: Upstream, reader: str, hear: Callable[[FeedMessage], None]) -> None:
    """Pass on messages until the worker leaves. reader: the reader's id.

    Raises UpstreamError, TimeoutError or msgspec.MsgspecError.
    """
    decode = msgspec.json.Decoder(FeedMessage).decode
    async with upstream.request("GET", FEED_PATH, [(ROUTE_HEADER, reader)]) as answer:
        if answer.status != 200:
            raise UpstreamError(f"it answers {answer.status}; do all members have the same token?")
        rest = b""
        while True:
            async with asyncio.timeout(_SILENCE):
                data = await answer.read()
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                hear(decode(line))
