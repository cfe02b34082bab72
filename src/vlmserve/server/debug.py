"""``GET /debug/cache`` with ``--enable-debug``: cache contents and unfinished requests, in numbers only."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.disk_stats import DiskStats
from vlmserve.errors import UnavailableError
from vlmserve.media.cache import ImageCacheStats
from vlmserve.server.errors import json_response
from vlmserve.server.service import Service
from vlmserve.types import EngineSnapshot

PATIENCE = 60.0
"""Seconds to wait for the engine, which answers between two steps."""


async def show_caches(request: Request) -> Response:
    """Show the contents of the caches and unfinished requests."""
    service: Service = request.app.state.service
    client = service.client
    try:
        async with asyncio.timeout(PATIENCE):
            snapshot = await client.calls.inspect()
    except TimeoutError:
        raise UnavailableError(f"The engine has been busy with one step for {PATIENCE:.0f} s; try again") from None
    return json_response(cache_report(snapshot, service.preparation.image_cache_stats()))


def cache_report(snapshot: EngineSnapshot, image_cache: ImageCacheStats | None) -> dict[str, Any]:
    stats = snapshot.stats
    return {
        "kv_blocks": {
            "total": stats.kv_blocks_total,
            "used": stats.kv_blocks_used,
            "free": stats.kv_blocks_total - stats.kv_blocks_used,
            "cached": stats.kv_blocks_cached,
            "evictions": stats.kv_evictions,
        },
        "state_slots": {
            "total": stats.state_slots_total,
            "used": stats.state_slots_used,
            "checkpoints": stats.state_checkpoints,
            "evictions": stats.state_evictions,
        },
        "host_states": {
            "total": stats.host_states_total,
            "used": stats.host_states_used,
            "offloaded": stats.states_offloaded,
            "loaded": stats.states_loaded,
        },
        "host_blocks": {
            "total": stats.host_blocks_total,
            "used": stats.host_blocks_used,
            "free": stats.host_blocks_total - stats.host_blocks_used,
            "offloaded": stats.blocks_offloaded,
            "loaded": stats.blocks_loaded,
        },
        "prefix_cache": {"queried_tokens": stats.prefix_queried_tokens, "cached_tokens": stats.prefix_cached_tokens},
        "encoder_cache": {
            "capacity_bytes": stats.encoder_cache_bytes,
            "used_bytes": stats.encoder_cache_used_bytes,
            "pinned_images": stats.encoder_cache_pinned,
            "queries": stats.encoder_queries,
            "hits": stats.encoder_hits,
        },
        "disk_cache": {name.removeprefix("disk_"): getattr(stats, name) for name in DiskStats.__struct_fields__},
        "image_cache": None
        if image_cache is None
        else {
            "capacity_bytes": image_cache.capacity_bytes,
            "used_bytes": image_cache.used_bytes,
            "images": image_cache.num_images,
            "hits": image_cache.hits,
            "misses": image_cache.misses,
        },
        "preemptions": stats.preemptions,
        "requests": [msgspec.structs.asdict(request) for request in snapshot.requests],
    }
