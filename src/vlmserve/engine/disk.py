"""The disk cache of an engine, as its settings say."""

from __future__ import annotations

import json

from blake3 import blake3

from vlmserve.cache.fetches import Fetches
from vlmserve.cache.tiers import DiskTier, Entries
from vlmserve.config import EngineConfig
from vlmserve.models.protocols import LoadedModel


def open_disk_cache(config: EngineConfig, model: LoadedModel) -> Fetches | None:
    """Return what reads and writes entries of this model. None: there is no folder, or it may not be used."""
    if config.disk_cache is None:
        return None
    entries = Entries.at(config.disk_cache, config.disk_cache_memory)
    return Fetches(DiskTier(entries, _identity(config, model))) if entries.is_usable() else None


def _identity(config: EngineConfig, model: LoadedModel) -> bytes:
    """The digest of all that entries depend on besides their keys, which cover images, tokens, adapters and salts."""
    return blake3(json.dumps([model.identity.hex(), str(model.dtype), config.tensor_parallel_size]).encode()).digest()
