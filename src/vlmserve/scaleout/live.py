"""Live statistics of a gateway (``/live``): all engines together, and each worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from vlmserve.media.cache import ImageCacheStats
from vlmserve.scaleout.gateway import Gateway
from vlmserve.scaleout.upstream import Upstream, UpstreamError
from vlmserve.server.live import LiveStats
from vlmserve.server.recent import Percentiles
from vlmserve.types import BlockMap, EngineStats

Stats = TypeVar("Stats", bound=msgspec.Struct)
_AGE = 0.5
"""Seconds that all viewers share one answer."""
_TIMEOUT = 1.0


class ClusterStats(LiveStats):
    """blocks: concatenated caches. latencies: the slowest worker's percentiles."""

    workers: dict[str, LiveStats] = msgspec.field(default_factory=dict)
    """By name."""


class ClusterView:
    """Asks the workers at most once in `_AGE` seconds."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._asked = float("-inf")
        self._latest: ClusterStats | None = None
        self._asking: asyncio.Future[ClusterStats] | None = None

    async def stats(self) -> ClusterStats:
        now = time.monotonic()
        if self._latest is None or now - self._asked >= _AGE:
            if self._asking is None:
                self._asking = asyncio.ensure_future(self._ask())
            try:
                self._latest = await asyncio.shield(self._asking)
            finally:
                self._asking = None
            self._asked = time.monotonic()
        return self._latest

    async def _ask(self) -> ClusterStats:
        heard = self._gateway.heard
        answers = await asyncio.gather(*(_live(upstream) for _, upstream in heard))
        found = {name: live for (name, _), live in zip(heard, answers, strict=True) if live is not None}
        every = list(found.values())
        engines = [live.engine for live in every if live.engine is not None]
        problem = self._gateway.problem()
        return ClusterStats(
            time=time.monotonic(),
            status=self._gateway.phase if problem is None else "loading",
            model=", ".join(sorted(self._gateway.models)),
            engine=_sum(EngineStats, engines) if engines else None,
            image_cache=_sum(ImageCacheStats, [live.image_cache for live in every if live.image_cache is not None]),
            blocks=_joined([live.blocks for live in every if live.blocks is not None]),
            latencies=_slowest(every),
            workers=found,
        )


async def _live(upstream: Upstream) -> LiveStats | None:
    try:
        async with asyncio.timeout(_TIMEOUT), upstream.request("GET", "/live") as answer:
            data = await answer.read_all()
            return msgspec.json.decode(data, type=LiveStats) if answer.status == 200 else None
    except (UpstreamError, TimeoutError, msgspec.MsgspecError):
        return None


def _sum(kind: type[Stats], every: Sequence[Stats]) -> Stats:
    return kind(**{name: sum(getattr(stats, name) for stats in every) for name in kind.__struct_fields__})


def _joined(maps: Sequence[BlockMap]) -> BlockMap | None:
    """The result has the blocks per cell of the coarsest."""
    if not maps:
        return None
    return BlockMap(
        sum(one.num_blocks for one in maps),
        max(one.blocks_per_cell for one in maps),
        [cell for one in maps for cell in one.held],
        [cell for one in maps for cell in one.cached],
        [cell for one in maps for cell in one.holders],
    )


def _slowest(every: Sequence[LiveStats]) -> dict[str, dict[str, Percentiles]]:
    shown: dict[str, dict[str, Percentiles]] = {}
    for live in every:
        for kind, windows in live.latencies.items():
            for window, one in windows.items():
                before = shown.setdefault(kind, {}).get(window, Percentiles(0))
                shown[kind][window] = Percentiles(
                    before.count + one.count,
                    *(max(before_p or 0.0, p or 0.0) if before_p or p else None for before_p, p in (
                        (before.p50, one.p50), (before.p90, one.p90), (before.p99, one.p99)
                    )),
                )  # fmt: skip
    return shown
