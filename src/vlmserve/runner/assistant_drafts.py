"""Drafts of an assistant (`models.assistant`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from vlmserve.kernels.attention import LayerCache
from vlmserve.models.protocols import Assistant, LanguageModel
from vlmserve.runner.batch import BatchBuilder
from vlmserve.runner.requests import RequestState, ScheduledRequest
from vlmserve.runner.run import Run
from vlmserve.steps import BlockCopy, ModelRunnerOutput


class _Chain(NamedTuple):
    """Drafts of one request."""

    state: RequestState
    row: int
    """Row of the last computed token."""
    num_drafts: int


class AssistantDrafts:
    """Runs an assistant after a step, for requests whose drafts may be worth it."""

    reads_all_rows = False

    def __init__(
        self, assistant: Assistant, language_model: LanguageModel, batches: BatchBuilder, caches: list[LayerCache]
    ) -> None:
        """caches: of the language model."""
        self._assistant, self._language_model, self._batches = assistant, language_model, batches
        self._caches = [caches[number] for number in assistant.sources]

    def copied(self, copies: Iterable[BlockCopy]) -> None:
        """See `Predictions.copied`: an assistant reads any block."""

    def run(
        self,
        run: Run,
        scheduled: Sequence[ScheduledRequest],
        wanted: Mapping[str, int],
        output: ModelRunnerOutput,
    ) -> None:
        """Write drafts to `output`. wanted: numbers of drafts, by request."""
        chains = []
        for request, end in zip(scheduled, itertools.accumulate(one.num_tokens for one in scheduled), strict=True):
            state, count = request.state, wanted.get(request.state.request_id, 0)
            sampled = output.token_ids.get(state.request_id, ())
            row, newest = request.last_right(end, len(sampled))
            if count > 0 and sampled and len(state.token_ids) == newest + 1:
                chains.append(_Chain(state, row, count))
        if not chains:
            return
        if (adapter_rows := self._language_model.adapter_rows) is not None:
            adapter_rows.clear()
        # Sampled rows are always computed.
        computed = range(len(run.hidden)) if run.rows is None else run.rows.tolist()
        states = run.hidden[[computed.index(chain.row) for chain in chains]]
        token_ids = [chain.state.token_ids[-1] for chain in chains]
        # The newest token has no keys yet, so a context ends before it.
        contexts = self._batches.build(
            [ScheduledRequest(one.state, len(one.state.token_ids) - 2, 1, [], 0, pending=True) for one in chains]
        )
        metadata = replace(contexts.metadata, num_positions=1 + max(contexts.metadata.host_context_lens))
        positions = contexts.positions + 1
        drafts: list[list[int]] = []
        for _ in range(max(chain.num_drafts for chain in chains)):
            embedded = self._language_model.embed(torch.tensor(token_ids))[:, : self._language_model.hidden_size]
            states, tokens = self._assistant.draft(embedded, states, positions, metadata, self._caches)
            token_ids = tokens.tolist()
            drafts.append(token_ids)
        for number, chain in enumerate(chains):
            output.predicted[chain.state.request_id] = [tokens[number] for tokens in drafts[: chain.num_drafts]]
