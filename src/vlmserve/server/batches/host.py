from __future__ import annotations

import asyncio
from typing import Protocol

from vlmserve.server.body import BodyMemory
from vlmserve.server.front import Front
from vlmserve.storage.store import Store


class BatchHost(Front, Protocol):
    bodies: BodyMemory
    store: Store | None
    """None: the server keeps no history and no batches."""
    batch_news: asyncio.Event
    """Set when a batch was created, was cancelled or has ended, and when the model has loaded."""
    serves_several: bool
    """True if the requests of a batch may name several models."""

    def check_serving(self) -> None:
        """Raise VLMServeError if no request can be answered now."""
