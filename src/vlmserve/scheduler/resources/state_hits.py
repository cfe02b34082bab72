"""Finds cached prefixes for models with states."""

from __future__ import annotations

from typing import Any

from vlmserve.cache.prefix import Chain, PrefixCache
from vlmserve.cache.states import StatePool
from vlmserve.layer_specs import CHUNK
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.checkpoints import PlannedCheckpoints, cached_checkpoints, leader_of, prefix_key
from vlmserve.scheduler.resources.memory import Found, KVMemory, boundaries_of, num_reusable
from vlmserve.scheduler.resources.state_misses import StateMisses


class StateHits(KVMemory):
    """Needs all blocks, also the partly filled one, and a checkpoint."""

    def __init__(self, cache: PrefixCache, block_size: int, *, states: StatePool, **options: Any) -> None:
        super().__init__(cache, block_size, **{**options, "max_chunk": options["max_chunk"] + CHUNK})
        self.states = states
        self.misses = StateMisses(cache, self.columns, block_size, states)
        self.planned = PlannedCheckpoints(block_size)

    def ready(self, request: Request) -> bool:
        found = self.find(request)
        self._found = request, found
        if not self._shares(request):
            return True
        start = found.num_tokens
        return 2 * (self._awaited(request, found) - start) < len(request.token_ids) - start

    def _awaited(self, request: Request, found: Found) -> int:
        """Tokens after which a running request will leave a checkpoint."""
        leader, shared = leader_of(request, found.reach, self.computing, self._size)
        places = {*request.boundaries}
        if leader is not None and leader.state is not None:
            places.update(number for number in leader.state.leaving if number <= shared)
        places = {number for number in places if found.num_tokens < number <= num_reusable(request)}
        return max((n for n in places if prefix_key(request, n, self._size) in self.planned), default=0)

    def arrive(self, request: Request) -> None:
        """Let a request with the same tokens leave a checkpoint where they part."""
        if not self._shares(request) or not self.states.spare_room:
            return
        leader, shared = leader_of(request, self.find(request).reach, self.computing, self._size)
        parting = shared // CHUNK * CHUNK
        if leader is None or leader.state is None:
            return
        if parting > leader.state.reached and parting not in leader.state.leaving:
            self.planned.add(leader, [parting])
            # it keeps the blocks of windows before the checkpoint
            leader.boundaries = leader.boundaries | {parting}

    def _shares(self, request: Request) -> bool:
        return self._prefix_caching and num_reusable(request) > 0

    def find(self, request: Request) -> Found:
        if not request.boundaries:
            request.boundaries = boundaries_of(request)
        pages = super().find(request)
        reach = pages.reach if self._shares(request) else -1
        for num_tokens in cached_checkpoints(request, reach, self.states, self._size):
            full = num_tokens // self._size
            chains = [
                Chain(found.keys[:full], request.tail_key(keys, num_tokens, self._size))
                for found, keys in zip(pages.chains, request.chains, strict=True)
            ]
            hits, _ = self.cache.find(chains, self.columns)
            if hits[0].end == full and (chains[0].tail is None or hits[0].tail is not None):
                return Found(chains, hits, pages.reach, num_tokens, needs_tails=True)
        return pages.without_hits()
