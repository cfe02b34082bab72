"""Says why a model with states could not reuse tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from vlmserve.cache.prefix import Column, PrefixCache
from vlmserve.cache.states import StatePool
from vlmserve.layer_specs import CHUNK
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.checkpoints import prefix_key
from vlmserve.scheduler.resources.misses import Lost, Misses, MissReason


class StateMisses(Misses):
    beyond_checkpoints: MissReason = "no_checkpoint"

    def __init__(self, cache: PrefixCache, columns: Sequence[Column], block_size: int, states: StatePool) -> None:
        super().__init__(cache, columns, block_size)
        self._states = states

    def _lost_checkpoint(self, request: Request, start: int, end: int) -> Lost:
        places = {*request.boundaries, *range(start - start % CHUNK + CHUNK, end + 1, CHUNK)}
        for num_tokens in sorted((one for one in places if start < one <= end), reverse=True):
            evicted_at = self._states.evicted_at(prefix_key(request, num_tokens, self._size))
            if evicted_at is not None:
                return Lost(num_tokens, evicted_at)
        return Lost(start)
