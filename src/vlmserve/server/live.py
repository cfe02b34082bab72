"""Live statistics (``GET /live``), without any content of requests."""

from __future__ import annotations

import asyncio
import time
from typing import get_args

import msgspec

from vlmserve.errors import VLMServeError
from vlmserve.media.cache import ImageCacheStats
from vlmserve.server.recent import WINDOWS, Latency, Percentiles
from vlmserve.server.service import Service
from vlmserve.types import BlockMap, EngineStats

MAP_AGE = 0.5
"""Seconds that all clients share one map of the blocks."""
PATIENCE = 0.2
"""Seconds to wait for the engine, which answers between two steps; then the previous map is shown."""


class LiveStats(msgspec.Struct):
    """The response of ``/live``."""

    time: float
    """Seconds on the server's own clock, to compute rates from two responses."""
    status: str
    """The server's phase, or "dead"."""
    model: str
    engine: EngineStats | None
    """Null without a living engine."""
    image_cache: ImageCacheStats | None
    blocks: BlockMap | None
    """Null until the engine has answered once."""
    latencies: dict[str, dict[str, Percentiles]]
    """By kind, then by the window in seconds."""


class LiveView:
    """Asks the engine at most once in `MAP_AGE` seconds."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._blocks: BlockMap | None = None
        self._asked = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def stats(self) -> LiveStats:
        service = self._service
        stats = service.engine_stats()
        if stats is not None:
            await self._refresh()
        alive = stats is not None or service.phase != "serving"
        recent = service.metrics.recent
        return LiveStats(
            time=time.monotonic(),
            status=service.phase if alive else "dead",
            model=service.model_name,
            engine=stats,
            image_cache=service.preparation.image_cache_stats(),
            blocks=None if stats is None else self._blocks,
            latencies={
                kind: {str(window): recent.percentiles(kind, window) for window in WINDOWS}
                for kind in get_args(Latency)
            },
        )

    async def _refresh(self) -> None:
        now = time.monotonic()
        if self._asking is None and now - self._asked >= MAP_AGE:
            self._asked = now
            self._asking = asyncio.ensure_future(self._ask())
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=PATIENCE)

    async def _ask(self) -> None:
        try:
            self._blocks = await self._service.client.calls.map_blocks()
        except VLMServeError:
            self._blocks = None  # the engine has died
        finally:
            self._asking = None
