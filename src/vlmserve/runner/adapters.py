"""The adapters of a step's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vlmserve.adapters.lora import Adapter
from vlmserve.adapters.slots import AdapterSlots
from vlmserve.models.protocols import LoadedModel
from vlmserve.runner.requests import ScheduledRequest
from vlmserve.steps import AdapterLoad

AdapterSource = Callable[[bytes], Adapter]
"""From a digest to the adapter, which is in memory when a step loads it."""


class RunnerAdapters:
    """Owns the model's slots for adapters, and knows which adapter has which."""

    def __init__(self, model: LoadedModel, num_slots: int, source: AdapterSource) -> None:
        if model.adaptable is None:
            raise ValueError("the model takes no adapters")
        self._slots = AdapterSlots(model.adaptable, num_slots)
        self._rows = model.language_model.adapter_rows = self._slots.rows
        self._source = source
        self._by_digest: dict[bytes, int] = {}

    def load(self, loads: Sequence[AdapterLoad]) -> None:
        """Put adapters into slots."""
        for slot, digest in loads:
            self._by_digest = {known: place for known, place in self._by_digest.items() if place != slot}
            self._slots.set(slot, self._source(digest))
            self._by_digest[digest] = slot

    def use_for_batch(self, batch: Sequence[ScheduledRequest], num_rows: int) -> None:
        """Rows of a batch have their requests' adapters; those behind them, which only pad, none."""
        if not any(request.state.adapter for request in batch):
            if self._rows.active:
                self._rows.clear()
            return
        slots = np.full(num_rows, -1, np.int32)
        counts = [request.num_tokens for request in batch]
        slots[: sum(counts)] = np.repeat(self._slots_of(batch), counts)
        self._rows.set(slots)

    def use_for_samples(self, batch: Sequence[ScheduledRequest]) -> None:
        """So have the rows of which tokens are sampled."""
        if self._rows.active:
            self._rows.set(np.repeat(self._slots_of(batch), [request.num_sampled for request in batch]))

    def use_for_all(self, digest: bytes) -> None:
        """All rows have one adapter; an empty digest: none."""
        self._rows.set_all(self._by_digest[digest] if digest else -1)

    def _slots_of(self, batch: Sequence[ScheduledRequest]) -> np.ndarray:
        return np.array([self._by_digest.get(request.state.adapter, -1) for request in batch], np.int32)
