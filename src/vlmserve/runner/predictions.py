"""Drafts of the model's own layer for multi-token prediction (`models.mtp`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vlmserve.kernels.attention import LayerCache
from vlmserve.models.protocols import LoadedModel, Predictor
from vlmserve.runner.batch import Batch, BatchBuilder
from vlmserve.runner.requests import RequestState, ScheduledRequest
from vlmserve.steps import ModelRunnerOutput


@dataclass(frozen=True, slots=True)
class _Chain:
    """Drafts of one request."""

    state: RequestState
    first: int
    """Index of the newest token, which the step sampled."""
    count: int
    drafts: list[int] = field(default_factory=list)


class Predictions:
    """Runs the layer after each step, so that its keys and values are in the cache for every computed token.

    It reads no adapters, and its drafts are the most likely tokens, whatever a request's sampling parameters are.
    """

    def __init__(
        self, model: LoadedModel, predictor: Predictor, block_size: int, num_columns: int, caches: list[LayerCache]
    ) -> None:
        self._model, self._predictor, self._caches = model, predictor, caches
        self._block_size, self._num_columns = block_size, num_columns
        self._batches = BatchBuilder(block_size, model.device, num_columns=num_columns)

    @classmethod
    def of(cls, model: LoadedModel, block_size: int, num_columns: int, caches: list[LayerCache]) -> Predictions | None:
        """None: the model has no such layer."""
        predictor = model.predictor
        return None if predictor is None else cls(model, predictor, block_size, num_columns, caches)

    def run(
        self,
        batch: Batch,
        embeddings: Tensor,
        hidden: Tensor,
        scheduled: Sequence[ScheduledRequest],
        wanted: Mapping[str, int],
        output: ModelRunnerOutput,
    ) -> None:
        """Write drafts to `output`.

        embeddings, hidden: of the batch's rows. wanted: the number of drafts by request. The last computed row of a
        request reads its next token; rows of wrong drafts are overwritten later.
        """
        if (rows := self._model.language_model.adapter_rows) is not None:
            rows.clear()
        chains, ends, next_ids, last_rows = [], [], [], []
        for request, end in zip(scheduled, itertools.accumulate(one.num_tokens for one in scheduled), strict=True):
            state, sampled = request.state, output.token_ids.get(request.state.request_id, ())
            row = end - len(request.draft_token_ids) + max(0, len(sampled) - 1) - 1
            first = request.start + row + 1 - (end - request.num_tokens)
            ends.append(row)
            next_ids.append(_text_token(state, first))
            count = min(wanted.get(state.request_id, 0), self._room(state, first))
            if count > 0 and len(state.token_ids) == first + 1:
                chains.append(_Chain(state, first, count))
                last_rows.append(row)
        following = embeddings.roll(-1, 0)
        following[torch.tensor(ends)] = self._embed(next_ids)
        states = self._predictor.predict(
            following, hidden, batch.positions, batch.metadata, self._caches, torch.tensor(last_rows, dtype=torch.int64)
        )
        while chains:
            for chain, token in zip(chains, self.logits_of(states).argmax(1).tolist(), strict=True):
                chain.drafts.append(token)
                output.predicted[chain.state.request_id] = chain.drafts
            left = [number for number, chain in enumerate(chains) if len(chain.drafts) < chain.count]
            chains = [chains[number] for number in left]
            if chains:
                states = self._next(chains, states[torch.tensor(left)])

    def logits_of(self, states: Tensor) -> Tensor:
        language_model = self._model.language_model
        return language_model.logits(states, self._model.device.logits_buffer(len(states), language_model.vocab_size))

    def _next(self, chains: Sequence[_Chain], states: Tensor) -> Tensor:
        """Return states after one more row of each chain, whose next token is its newest draft."""
        rows = [
            ScheduledRequest(chain.state, chain.first + len(chain.drafts) - 1, 1, [], 0, pending=True)
            for chain in chains
        ]
        batch = self._batches.build(rows)
        embeddings = self._embed([chain.drafts[-1] for chain in chains])
        wanted = torch.arange(len(chains))
        return self._predictor.predict(embeddings, states, batch.positions, batch.metadata, self._caches, wanted)

    def _embed(self, token_ids: Sequence[int]) -> Tensor:
        return self._model.language_model.embed(torch.tensor(token_ids))

    def _room(self, state: RequestState, first: int) -> int:
        """Drafts that fit into the request's blocks. All but the first need a place in the cache."""
        blocks = min(map(len, state.block_tables[: self._num_columns]))
        return 1 + max(0, blocks * self._block_size - first)


def _text_token(state: RequestState, index: int) -> int:
    """0 for unknown tokens and images."""
    if index >= len(state.token_ids) or state.images_between(index, index + 1):
        return 0
    return state.token_ids[index]
