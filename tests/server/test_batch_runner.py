"""The task that looks for batches ends with its server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from vlmserve.server.batches.runner import batches_running
from vlmserve.server.service import Service
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig


@pytest.mark.parametrize("turns", range(4))
async def test_runner_with_news_can_be_cancelled(folder: Path, turns: int) -> None:
    """A server that is stopped while its model becomes ready cancels the runner when the news is new."""
    service = Service(EngineConfig(model=str(folder), engine="mock"), MediaConfig(), ServerConfig(storage_url="memory"))
    async with asyncio.timeout(60):
        async with batches_running(service):
            for _ in range(5):
                await asyncio.sleep(0)
            service.batch_news.set()
            for _ in range(turns):
                await asyncio.sleep(0)
    service.close()
