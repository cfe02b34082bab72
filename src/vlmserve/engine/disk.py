from __future__ import annotations

import json

import msgspec
from blake3 import blake3

from vlmserve.cache.fetches import Fetches
from vlmserve.cache.rank_fetches import RankFetches
from vlmserve.cache.tiers import DiskTier, Entries
from vlmserve.folders import code_digest
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.weights_cache import PACKING
from vlmserve.runner.runner import ModelRunner
from vlmserve.scheduler.resources.images import Images
from vlmserve.scheduler.resources.memory import KVMemory
from vlmserve.scheduler.resources.states import StateMemory
from vlmserve.scheduler.resources.stored import EntryBytes, Stored
from vlmserve.settings.config import EngineConfig
from vlmserve.steps import DiskStores, ModelRunnerOutput

CODE = (*PACKING, "cache", "runner")
"""Modules and folders that entries depend on."""


class DiskCache:
    """Stores an engine's embeddings, KV blocks and states on disk. Each rank stores its shards of blocks and states."""

    def __init__(self, config: EngineConfig, tier: DiskTier, runner: ModelRunner, memory: KVMemory) -> None:
        self._fetches = Fetches(tier) if config.tensor_parallel_size == 1 else RankFetches(tier)
        self._runner, self._memory = runner, memory
        runner.keep_images(tier)
        memory.cache.stored = self._fetches.contents
        if isinstance(memory, StateMemory):
            memory.states.stored = self._fetches.contents
        if config.enable_prefix_caching:
            memory.stores = []
            tier.prepare(runner.blocks.populate)

    @classmethod
    def open(cls, config: EngineConfig, model: LoadedModel, runner: ModelRunner, memory: KVMemory) -> DiskCache | None:
        """None: not configured or not usable."""
        tier = disk_tier(config, model)
        return None if tier is None else cls(config, tier, runner, memory)

    def resource(self, images: Images) -> Stored:
        """Return the resource that requests wait for. `images` finds what it has read."""
        images.stored = self._fetches.contents
        tensors = self._runner.blocks
        sizes = EntryBytes(tensors.block_contents.num_bytes, tensors.state_contents.num_bytes)
        return Stored(self._fetches, images, self._memory, sizes)

    def ran(self, output: ModelRunnerOutput) -> None:
        """Store the blocks and checkpoints that a step has filled, before the next step is planned."""
        self._fetches.ran(output)
        memory, stores = self._memory, DiskStores()
        if memory.stores:
            stores.blocks, memory.stores = memory.stores, []
        if isinstance(memory, StateMemory):
            stores.states, memory.state_stores = memory.state_stores, []
        stores.forgotten, memory.forgotten = memory.forgotten, []
        if stores:
            self._runner.keep(self._fetches.tier, stores)

    def stats(self) -> dict[str, int]:
        return msgspec.structs.asdict(self._fetches.tier.stats())


def disk_tier(config: EngineConfig, model: LoadedModel, rank: int = 0) -> DiskTier | None:
    """None: not configured or not usable."""
    if not config.disk_cache:
        return None
    entries = Entries.at(config.disk_cache, config.disk_cache_memory)
    return DiskTier(entries, _identity(config, model, rank)) if entries.is_usable(log=rank == 0) else None


def _identity(config: EngineConfig, model: LoadedModel, rank: int) -> bytes:
    """Digest what entries depend on, except their keys (images, tokens, adapters, salts)."""
    parts = [model.identity.hex(), str(model.dtype), rank, config.tensor_parallel_size, code_digest(CODE)]
    return blake3(json.dumps(parts).encode()).digest()
