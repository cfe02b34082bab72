"""Drafts of the model's own layer for multi-token prediction (`models.mtp`)."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch
from torch import Tensor

from vlmserve.kernels.attention import BatchMetadata, LayerCache
from vlmserve.models.protocols import LoadedModel, Predictor
from vlmserve.runner.batch import BatchBuilder
from vlmserve.runner.requests import RequestState, ScheduledRequest
from vlmserve.runner.run import Run
from vlmserve.steps import BlockCopy, ModelRunnerOutput


@dataclass(frozen=True, slots=True)
class _Chain:
    """Drafts of one request."""

    state: RequestState
    first: int
    """Index of the newest token, which the step sampled."""
    count: int
    drafts: list[int] = field(default_factory=list)


class Predictions:
    """Runs the layer after a step, for requests whose drafts may be worth it.

    Its keys and values are in the requests' blocks. Blocks of tokens that it did not run for lack them, so the layer
    attends only to the tokens since it last began. It reads no adapters, and its drafts are the most likely tokens,
    whatever a request's sampling parameters are.
    """

    reads_all_rows = True
    """`run` needs the hidden states of all rows."""

    def __init__(
        self, model: LoadedModel, predictor: Predictor, block_size: int, num_columns: int, caches: list[LayerCache]
    ) -> None:
        self._model, self._predictor, self._caches = model, predictor, caches
        self._block_size, self._num_columns, self._column = block_size, num_columns, caches[-1].column
        self._batches = BatchBuilder(block_size, model.device, num_columns=num_columns)
        self._filled = array("i", [0] * len(caches[-1].keys))
        """By block, the leading tokens whose keys and values it has."""

    @classmethod
    def of(cls, model: LoadedModel, block_size: int, num_columns: int, caches: list[LayerCache]) -> Predictions | None:
        """None: the model has no such layer."""
        predictor = model.predictor
        return None if predictor is None else cls(model, predictor, block_size, num_columns, caches)

    def copied(self, copies: Iterable[BlockCopy]) -> None:
        """Note copies of blocks. Blocks from the host or the disk are assumed to be complete."""
        for kind, source, target in copies:
            if kind != "save":
                self._filled[target] = self._filled[source] if kind == "copy" else self._block_size

    def run(
        self,
        run: Run,
        scheduled: Sequence[ScheduledRequest],
        wanted: Mapping[str, int],
        output: ModelRunnerOutput,
    ) -> None:
        """Write drafts to `output`.

        run: with all rows, unless nothing is wanted. wanted: by request that runs through the layer, the number of
        drafts. The last computed row of a request reads its next token; rows of wrong drafts are overwritten later.
        """
        running = [request for request in scheduled if request.state.request_id in wanted]
        for request in scheduled:
            if request.state.request_id not in wanted:
                self._skip(request)
        if not running:
            return
        batch, embeddings, hidden = run.batch, run.embeddings, run.hidden
        if len(running) < len(scheduled):
            rows = _rows_of(running, scheduled)
            batch = self._batches.build([_with_new_tokens(request) for request in running])
            embeddings, hidden = embeddings[rows], hidden[rows]
        if (adapter_rows := self._model.language_model.adapter_rows) is not None:
            adapter_rows.clear()
        firsts = [self._first(request) for request in running]
        chains, ends, next_ids, last_rows = [], [], [], []
        for request, end in zip(running, itertools.accumulate(one.num_tokens for one in running), strict=True):
            state, sampled = request.state, output.token_ids.get(request.state.request_id, ())
            row, first = request.last_right(end, len(sampled))
            self._fill(state, request.start, first)
            ends.append(row)
            next_ids.append(_text_token(state, first))
            count = min(wanted[state.request_id], self._room(state, first))
            if count > 0 and len(state.token_ids) == first + 1:
                chains.append(_Chain(state, first, count))
                last_rows.append(row)
        following = embeddings.roll(-1, 0)
        following[torch.tensor(ends)] = self._embed(next_ids)
        metadata, last = self._since(batch.metadata, firsts), torch.tensor(last_rows, dtype=torch.int64)
        states = self._predictor.predict(following, hidden, batch.positions, metadata, self._caches, last)
        while chains:
            for chain, token in zip(chains, self.logits_of(states).argmax(1).tolist(), strict=True):
                chain.drafts.append(token)
                output.predicted[chain.state.request_id] = chain.drafts
            left = [number for number, chain in enumerate(chains) if len(chain.drafts) < chain.count]
            chains = [chains[number] for number in left]
            if chains:
                states = self._next(chains, states[torch.tensor(left)])

    def _skip(self, request: ScheduledRequest) -> None:
        """Note that a request's rows lack keys and values of the layer."""
        table, size = request.state.block_tables[self._column], self._block_size
        for number in range(request.start // size, -(-request.end // size)):
            block = table[number]
            self._filled[block] = min(self._filled[block], max(0, request.start - number * size))

    def _fill(self, state: RequestState, start: int, end: int) -> None:
        """Note that the layer runs for tokens ``start <= i < end``."""
        table, size, since = state.block_tables[self._column], self._block_size, state.predicted_since
        assert since is not None
        for number in range(start // size, -(-end // size)):
            self._filled[table[number]] = min(size, end - number * size) if since <= number * size else 0

    def _first(self, request: ScheduledRequest) -> int:
        """Return the first token whose keys and values the layer may read, at the start of a block."""
        state, start, size = request.state, request.start, self._block_size
        table = state.block_tables[self._column]
        number, rest = divmod(start, size)
        continues = (
            self._filled[table[number]] >= rest if rest else not start or self._filled[table[number - 1]] == size
        )
        if not continues:
            state.predicted_since = start
        elif state.predicted_since is None:
            while number and self._filled[table[number - 1]] == size:
                number -= 1
            state.predicted_since = number * size
        return self._block_start(request)

    def _block_start(self, request: ScheduledRequest) -> int:
        """The first rows since the layer began also read what its block has of other tokens."""
        since, size = request.state.predicted_since, self._block_size
        assert since is not None
        first = -(-since // size) * size
        return first if first <= request.start else first - size

    def _since(self, metadata: BatchMetadata, firsts: Sequence[int]) -> BatchMetadata:
        """Leave out tokens before `firsts`. RoPE's rotations are relative, so positions stay."""
        if not any(firsts):
            return metadata
        tables, lens = metadata.block_tables.clone(), metadata.context_lens.clone()
        host = list(metadata.host_context_lens)
        for row, first in enumerate(firsts):
            skipped = first // self._block_size
            kept = tables.shape[2] - skipped
            tables[self._column, row, :kept] = metadata.block_tables[self._column, row, skipped:]
            lens[row] -= first
            host[row] -= first
        longest = max(metadata.num_positions, *metadata.host_context_lens)
        return replace(metadata, block_tables=tables, context_lens=lens, host_context_lens=host, num_positions=longest)

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
        metadata = self._since(batch.metadata, [self._block_start(row) for row in rows])
        embeddings = self._embed([chain.drafts[-1] for chain in chains])
        wanted = torch.arange(len(chains))
        return self._predictor.predict(embeddings, states, batch.positions, metadata, self._caches, wanted)

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


def _rows_of(some: Sequence[ScheduledRequest], scheduled: Sequence[ScheduledRequest]) -> Tensor:
    """Return the rows of some scheduled requests."""
    chosen, end, rows = {id(request) for request in some}, 0, list[int]()
    for request in scheduled:
        end += request.num_tokens
        if id(request) in chosen:
            rows += range(end - request.num_tokens, end)
    return torch.tensor(rows)


def _with_new_tokens(request: ScheduledRequest) -> ScheduledRequest:
    """Leave out the drafts that the request's state has as tokens."""
    unknown = max(0, request.end - len(request.state.token_ids))
    drafts = request.draft_token_ids[len(request.draft_token_ids) - unknown :]
    return msgspec.structs.replace(request, draft_token_ids=drafts)
