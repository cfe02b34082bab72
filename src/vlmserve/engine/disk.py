"""The disk cache of an engine."""

from __future__ import annotations

import json
import logging

import msgspec
from blake3 import blake3

from vlmserve.cache.fetches import Fetches
from vlmserve.cache.tiers import DiskTier, Entries
from vlmserve.folders import code_digest
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.weights_cache import PACKING
from vlmserve.runner.runner import ModelRunner
from vlmserve.scheduler.resources.images import Images
from vlmserve.scheduler.resources.memory import KVMemory
from vlmserve.scheduler.resources.states import StateMemory
from vlmserve.scheduler.resources.stored import Stored, StoredSizes
from vlmserve.settings.config import EngineConfig

CODE = (*PACKING, "cache", "runner")
"""Modules and folders that entries depend on."""

logger = logging.getLogger(__name__)


class DiskCache:
    """Stores an engine's embeddings, KV blocks and states on disk; with several ranks only embeddings."""

    def __init__(self, config: EngineConfig, tier: DiskTier, runner: ModelRunner, memory: KVMemory) -> None:
        self._fetches = Fetches(tier)
        self._runner, self._memory = runner, memory
        runner.keep_images(tier)
        memory.cache.stored = self._fetches.contents
        if isinstance(memory, StateMemory):
            memory.states.stored = self._fetches.contents
        if config.tensor_parallel_size > 1:
            logger.warning("disk cache: no KV blocks or states, since each rank holds a share of them")
        elif config.enable_prefix_caching:
            memory.stores = []
            tier.prepare(runner.blocks.populate)

    @classmethod
    def open(cls, config: EngineConfig, model: LoadedModel, runner: ModelRunner, memory: KVMemory) -> DiskCache | None:
        """None: not configured or not usable."""
        if not config.disk_cache:
            return None
        entries = Entries.at(config.disk_cache, config.disk_cache_memory)
        if not entries.is_usable():
            return None
        return cls(config, DiskTier(entries, _identity(config, model)), runner, memory)

    def resource(self, images: Images) -> Stored:
        """Return the resource that requests wait for. `images` finds what it has read."""
        images.stored = self._fetches.contents
        tensors = self._runner.blocks
        sizes = StoredSizes(tensors.block_contents.num_bytes, tensors.state_contents.num_bytes)
        return Stored(self._fetches, images, self._memory, sizes)

    def keep(self) -> None:
        """Store the blocks and checkpoints that a step has filled, before the next step is planned."""
        memory, tier, tensors = self._memory, self._fetches.tier, self._runner.blocks
        if memory.stores:
            self._runner.keep(tier, tensors.block_contents, memory.stores)
            memory.stores = []
        if isinstance(memory, StateMemory) and memory.state_stores:
            self._runner.keep(tier, tensors.state_contents, memory.state_stores)
            memory.state_stores = []
        if memory.forgotten:
            tier.forget(memory.forgotten)
            memory.forgotten = []

    def stats(self) -> dict[str, int]:
        return msgspec.structs.asdict(self._fetches.tier.stats())


def _identity(config: EngineConfig, model: LoadedModel) -> bytes:
    """Digest what entries depend on, except their keys (images, tokens, adapters, salts)."""
    parts = [model.identity.hex(), str(model.dtype), config.tensor_parallel_size, code_digest(CODE)]
    return blake3(json.dumps(parts).encode()).digest()
