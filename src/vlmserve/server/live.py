"""``GET /live``: what the engine does now, for the page that shows it and for people without Prometheus.

Numbers only: nothing of what anybody asks or answers.
"""

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
"""Seconds for which clients share one map of the blocks."""
PATIENCE = 0.2
"""Seconds to wait for the engine, which answers between two steps, before the map from before is shown."""


class LiveStats(msgspec.Struct):
    """``/live``. time: seconds on a clock of the server's own, by which rates can be computed from two answers.

    status: the server's phase, or "dead". engine: null without a living engine. blocks: null until the engine has first
    been asked. latencies: by kind, then by the seconds that they are of.
    """

    time: float
    status: str
    model: str
    engine: EngineStats | None
    image_cache: ImageCacheStats | None
    blocks: BlockMap | None
    latencies: dict[str, dict[str, Percentiles]]


class LiveView:
    """Answers all clients of /live, and asks the engine at most twice a second, however many they are."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._blocks: BlockMap | None = None
        self._asked = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def stats(self) -> LiveStats:
        """The stats as they are now; the blocks as of the engine's latest answer."""
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
            self._blocks = None  # the engine has gone meanwhile
        finally:
            self._asking = None
