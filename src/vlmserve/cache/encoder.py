"""Tracks image embeddings in memory, and the requests that need them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping


class EncoderCache:
    """Images by 32-byte key, bounded in bytes. The least recently used unpinned image is evicted first."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._pinned_bytes = 0
        self._sizes: dict[bytes, int] = {}
        self._pins: dict[bytes, set[str]] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    def fits(self, sizes: Mapping[bytes, int]) -> bool:
        more = sum(size for key, size in sizes.items() if key not in self._pins)
        return self._pinned_bytes + more <= self.capacity_bytes

    def make_room(self, size: int) -> list[bytes]:
        """Evict idle images. Returns their keys. Raises KeyError if only pinned images are left."""
        evicted = []
        while self.used_bytes + size > self.capacity_bytes:
            key, _ = self._idle.popitem(last=False)
            self.used_bytes -= self._sizes.pop(key)
            evicted.append(key)
        return evicted

    def add(self, key: bytes, size: int) -> None:
        """Raises ValueError if the image exists or does not fit."""
        if key in self._sizes or self.used_bytes + size > self.capacity_bytes:
            raise ValueError("the image is cached already or does not fit")
        self._sizes[key] = size
        self._idle[key] = None
        self.used_bytes += size

    def pin(self, key: bytes, request_id: str) -> bool:
        """Returns False if this request has already pinned the image."""
        holders = self._pins.setdefault(key, set())
        if request_id in holders:
            return False
        holders.add(request_id)
        if key in self._idle:
            del self._idle[key]
            self._pinned_bytes += self._sizes[key]
        return True

    def holders(self, key: bytes) -> frozenset[str]:
        return frozenset(self._pins.get(key, ()))

    def remove(self, key: bytes) -> None:
        """Raises KeyError if the image is pinned or unknown."""
        del self._idle[key]
        self.used_bytes -= self._sizes.pop(key)

    def unpin(self, key: bytes, request_id: str) -> None:
        holders = self._pins.get(key)
        if holders is None or request_id not in holders:
            return
        holders.remove(request_id)
        if not holders:
            del self._pins[key]
            self._idle[key] = None
            self._pinned_bytes -= self._sizes[key]
