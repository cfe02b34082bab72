from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from vlmserve.adapters.lora import Adapter
from vlmserve.adapters.mixture import Mixture
from vlmserve.adapters.slots import AdapterSlots
from vlmserve.kernels.adapters import RowSlots, slots_of_rows
from vlmserve.kernels.transfers import to_device
from vlmserve.models.protocols import LoadedModel
from vlmserve.runner.batch import Batch
from vlmserve.runner.requests import ScheduledRequest
from vlmserve.steps import AdapterLoad

Observer = Callable[[str, int, Mixture, Tensor], None]
"""Called with a request, its first token of a step, its mixture, and its scalings ``[tokens, columns]``."""
AdapterSource = Callable[[bytes], Adapter]
"""Returns an adapter in memory by its digest."""
NO_CHANGES, NO_MIXTURE = b"no changes", b"no mixture"
"""Digests of an empty LoRA and an empty X-LoRA adapter, for warm-up steps only."""


class RunnerAdapters:
    """Owns the model's adapter slots. observer: gets all scalings."""

    def __init__(self, model: LoadedModel, num_slots: int, source: AdapterSource, max_rank: int = 0) -> None:
        """max_rank: see `AdapterSlots`."""
        if model.adaptable is None:
            raise ValueError("the model takes no adapters")
        self._slots = AdapterSlots(model.adaptable, num_slots, max_rank)
        self._rows = model.language_model.adapter_rows = self._slots.rows
        self._source = source
        self._device = model.device.torch_device
        self._by_digest = {NO_CHANGES: 0, NO_MIXTURE: 0}
        self._mixtures = {NO_MIXTURE: Mixture.constant(model.language_model.hidden_size, self._device)}
        self._sampled: RowSlots | None = None
        self.observer: Observer | None = None

    def reserving(self) -> AbstractContextManager[None]:
        return self._rows.reserving()

    def load(self, loads: Sequence[AdapterLoad]) -> None:
        for slot, digest in loads:
            self._by_digest = {known: place for known, place in self._by_digest.items() if place != slot}
            self._mixtures = {known: mixture for known, mixture in self._mixtures.items() if known in self._by_digest}
            adapter = self._source(digest)
            self._slots.set(slot, adapter)
            self._by_digest[digest] = slot
            if adapter.mixture is not None:
                self._mixtures[digest] = adapter.mixture

    def slots_of(self, batch: Sequence[ScheduledRequest]) -> list[int]:
        """The slot of each request, negative without an adapter. Empty if no request has one."""
        if not any(request.state.adapter for request in batch):
            return []
        return [self._by_digest.get(request.state.adapter, -1) for request in batch]

    def use_for_batch(
        self, scheduled: Sequence[ScheduledRequest], batch: Batch, scalings: Tensor | None = None
    ) -> None:
        """Select the adapters of a batch's rows. scalings: see `AdapterRows`."""
        self._sampled = None
        if batch.adapters is not None:
            counts = tuple([request.num_sampled for request in scheduled])
            runs, _ = slots_of_rows(tuple(self.slots_of(scheduled)), counts)
            self._sampled = RowSlots(runs, batch.adapters.slots.index_select(0, batch.sampled_rows))
            self._rows.use(batch.adapters, scalings, self._sampled)
        elif self._rows.active:
            self._rows.clear()

    def slots_of_scaling_pass(self, mixed: Sequence[ScheduledRequest]) -> list[int]:
        """Like `slots_of`, for X-LoRA's scaling pass. Scaling 0 counts as none."""
        mixtures = [self._mixtures[request.state.adapter] for request in mixed]
        slots = zip(mixtures, self.slots_of(mixed), strict=True)
        found = [-1 if mixture.of_scaling_pass is None else slot for mixture, slot in slots]
        return found if any(slot >= 0 for slot in found) else []

    def use_for_scaling_pass(self, mixed: Sequence[ScheduledRequest], batch: Batch) -> None:
        if batch.adapters is None:
            self._rows.clear()
            return
        scalings = torch.zeros(len(mixed), self._num_columns(mixed), device=self._device)
        for row, request in zip(scalings, mixed, strict=True):
            if (constant := self._mixtures[request.state.adapter].of_scaling_pass) is not None:
                row[: len(constant)] = constant
        owner = np.repeat(np.arange(len(mixed)), [request.num_tokens for request in mixed])
        self._rows.use(batch.adapters, scalings[to_device(torch.from_numpy(owner), self._device)])

    def scalings(
        self,
        batch: Sequence[ScheduledRequest],
        mixed: Sequence[ScheduledRequest],
        hidden: Tensor,
        sums: dict[str, list[float]],
    ) -> Tensor:
        """Return float32 ``[rows, columns]``.

        mixed: the X-LoRA requests. hidden: final states of the scaling pass, ``[rows of mixed, hidden_size]``. sums:
        receives scalings by adapter, averaged over layers and summed over tokens.
        """
        of_requests: dict[str, Tensor] = {}
        first = 0
        for digest, group in itertools.groupby(mixed, lambda request: request.state.adapter):
            requests = list(group)
            counts = [request.num_tokens for request in requests]
            ids = [request.state.request_id for request in requests]
            mixture = self._mixtures[digest]
            found = mixture.scalings(hidden[first : first + sum(counts)])
            first += sum(counts)
            totals = np.add.reduceat(mixture.means(found).cpu().numpy(), [0, *itertools.accumulate(counts[:-1])])
            sums.update(zip(ids, totals.tolist(), strict=True))
            of_requests.update(zip(ids, torch.split(found, counts), strict=True))
            if self.observer is not None:
                for request in requests:
                    name = request.state.request_id
                    self.observer(name, request.start, mixture, of_requests[name])
        if len(batch) == 1:
            return of_requests[batch[0].state.request_id]
        num_rows = sum(request.num_tokens for request in batch)
        scalings = torch.zeros(num_rows, self._num_columns(mixed), device=self._device)
        first = 0
        for request in batch:
            if (own := of_requests.get(request.state.request_id)) is not None:
                scalings[first : first + len(own), : own.shape[1]] = own
            first += request.num_tokens
        return scalings

    def _num_columns(self, batch: Sequence[ScheduledRequest]) -> int:
        return max(self._mixtures[request.state.adapter].num_columns for request in batch)

    def use_for_samples(self) -> None:
        if self._sampled is not None:
            self._rows.use(self._sampled)

    def use_for_all(self, digest: bytes) -> None:
        """digest: empty for none."""
        self._rows.set_all(self._by_digest[digest] if digest else -1)
