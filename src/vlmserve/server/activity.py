"""A line in the log every few seconds while the server has requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable

from vlmserve.types import EngineStats

logger = logging.getLogger(__name__)


def activity_line(before: EngineStats, after: EngineStats, seconds: float) -> str | None:
    """Describe the time between two snapshots; None if the engine was idle. The last line says "0 running"."""
    busy = any(stats.num_running or stats.num_waiting for stats in (before, after))
    if not busy and after.steps == before.steps:
        return None

    def since(field: str) -> int:
        grown: int = getattr(after, field) - getattr(before, field)
        return grown

    prompt, generation = since("prompt_tokens") / seconds, since("generation_tokens") / seconds
    parts = [
        f"{after.num_running} running, {after.num_waiting} waiting",
        f"prompt {prompt:.1f} tokens/s, generation {generation:.1f} tokens/s",
        f"KV cache {_percent(after.kv_blocks_used, after.kv_blocks_total)} used",
    ]
    for name, queries, hits in (
        ("prefix", since("prefix_queried_tokens"), since("prefix_cached_tokens")),
        ("encoder", since("encoder_queries"), since("encoder_hits")),
    ):
        if queries:
            parts.append(f"{name} hits {_percent(hits, queries)}")
    if after.images_in_progress:
        images = "1 image" if after.images_in_progress == 1 else f"{after.images_in_progress} images"
        parts.append(f"encoding {images}, about {after.image_seconds_left:.0f} s left")
    if preemptions := since("preemptions"):
        parts.append(f"{preemptions} preempted")
    offloaded, loaded = since("blocks_offloaded"), since("blocks_loaded")
    if offloaded or loaded:
        parts.append(f"blocks: {offloaded} offloaded, {loaded} loaded")
    return " | ".join(parts)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"


@contextlib.asynccontextmanager
async def activity_log(stats: Callable[[], EngineStats | None], interval: float) -> AsyncGenerator[None, None]:
    """Log the activity every `interval` seconds and at the end; never if `interval` is 0."""
    if interval == 0:
        yield
        return
    watch = _Watch(stats)
    task = asyncio.ensure_future(watch.run(interval))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        watch.report()


class _Watch:
    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats
        self._before = stats() or EngineStats()
        self._then = time.monotonic()

    async def run(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            self.report()

    def report(self) -> None:
        after, now = self._stats(), time.monotonic()
        if after is None or now <= self._then:
            return
        # A restarted engine counts from 0.
        before = EngineStats() if after.steps < self._before.steps else self._before
        line = activity_line(before, after, now - self._then)
        self._before, self._then = after, now
        if line is not None:
            logger.info(line)
