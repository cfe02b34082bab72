"""Convert a step's requests to the tensors of one flat batch."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from vlmserve.devices.graphs import captured_sequences, captured_width
from vlmserve.kernels.adapters import RowSlots, Run, slots_of_rows
from vlmserve.kernels.attention import BatchMetadata, BidirectionalRows, CrossRows, place_tokens
from vlmserve.kernels.states import Drafts, Segments, StateRows
from vlmserve.layer_specs import PADDING_SLOT
from vlmserve.models.grid_positions import grid_positions
from vlmserve.models.image_rows import ImageRows
from vlmserve.runner.requests import RequestState, ScheduledRequest

_NOTHING_DRAWN: dict[str, int] = {}
_NO_STATES: dict[bytes, Tensor] = {}


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor
    """int64 ``[tokens]``. Image placeholders have id 0, see `image_rows`."""
    positions: Tensor
    """int64 ``[tokens]``, or ``[3, tokens]`` (frame, row, column) if images have grids. Long requests start after all
    positions of short requests."""
    metadata: BatchMetadata
    image_rows: list[ImageRows]
    sampled_rows: Tensor
    """int64, in the order of the requests: rows that may sample a token."""
    drawn_rows: Tensor | None
    """int64 ``[tokens]``: the index of each row's token in the previous step's samples. None: all tokens are known."""
    adapters: RowSlots | None
    """Padding rows have no adapter."""
    is_repeatable: bool
    """True if the device may have captured this kind of step. The batch is padded then."""
    extra: Sequence[Tensor] = ()
    scaling_pass: Batch | None = None
    """X-LoRA's scaling pass, which runs first."""


class BatchDevice(Protocol):
    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]: ...

    def padded_rows(self, num_rows: int, num_decodes: int) -> int | None: ...


class BatchBuilder:
    """A batch is valid until the next `build`, which reuses its memory."""

    def __init__(
        self,
        block_size: int,
        device: BatchDevice,
        padding_block: int = 0,
        cross_states: Mapping[bytes, Tensor] = _NO_STATES,
        num_columns: int = 1,
        *,
        has_states: bool = False,
    ) -> None:
        """cross_states: cross-attention states by key. num_columns: see `CacheLayout`. has_states: see `StateRows`."""
        self._device = device
        self._passes = [
            BatchPacker(block_size, device, padding_block, cross_states, num_columns, number, has_states=has_states)
            for number in (0, 1)
        ]

    def build(
        self,
        scheduled: Sequence[ScheduledRequest],
        drawn: Mapping[str, int] = _NOTHING_DRAWN,
        extra: Sequence[np.ndarray] = (),
        adapters: Sequence[int] = (),
        mixed: Sequence[ScheduledRequest] = (),
        mixed_adapters: Sequence[int] = (),
    ) -> Batch:
        """Pack at least one request. All or none wait for tokens of the previous step.

        drawn: the index of each waiting request's token. extra: other arrays to upload. adapters: slots, negative for
        none. mixed, mixed_adapters: for the scaling pass.
        """
        packed = [self._passes[0].pack(scheduled, drawn, adapters, rounds_width=bool(mixed))]
        if mixed:
            packed.append(self._passes[1].pack(mixed, drawn, mixed_adapters, rounds_width=True))
        # Captured steps use fixed addresses, so arrays of varying size come last.
        arrays: list[np.ndarray] = []
        for level in range(3):
            for one in packed:
                arrays += one.parts[level].values()
        uploaded = iter(self._device.upload([*arrays, *extra]))
        tensors: list[dict[str, Tensor]] = [{} for _ in packed]
        for level in range(3):
            for one, own in zip(packed, tensors, strict=True):
                for name in one.parts[level]:
                    own[name] = next(uploaded)
        scaling_pass = packed[1].batch(tensors[1]) if mixed else None
        return packed[0].batch(tensors[0], [*uploaded], scaling_pass)


@dataclass(slots=True)
class PackedBatch:
    parts: tuple[dict[str, np.ndarray], ...]
    """Arrays to upload: arrays sized by the numbers of rows and sequences, then block tables, then arrays of varying
    size."""
    query_lens: list[int]
    context_lens: list[int]
    num_decodes: int
    runs: Sequence[Run]
    image_rows: list[ImageRows]
    bidirectional: list[BidirectionalRows]
    num_positions: int
    cross: list[CrossRows]
    segments: Segments | None
    wanted: Sequence[int] | None
    is_repeatable: bool

    def batch(
        self, tensors: Mapping[str, Tensor], extra: Sequence[Tensor] = (), scaling_pass: Batch | None = None
    ) -> Batch:
        states, segments = None, self.segments
        if segments is not None:
            of_segments = {name: tensors[key] for name in Segments._fields if (key := f"segment {name}") in tensors}
            states = StateRows(**of_segments, host=segments)
        metadata = BatchMetadata(
            query_starts=tensors["query_starts"],
            context_lens=tensors["context_lens"],
            block_tables=tensors["block_tables"],
            slot_mapping=tensors["slot_mapping"],
            query_lens=self.query_lens,
            host_context_lens=self.context_lens,
            num_decodes=self.num_decodes,
            bidirectional=self.bidirectional,
            num_positions=self.num_positions,
            cross=self.cross,
            decodes=tensors.get("decodes"),
            wanted=self.wanted,
            states=states,
        )
        return Batch(
            token_ids=tensors["token_ids"],
            positions=tensors["positions"],
            metadata=metadata,
            image_rows=self.image_rows,
            sampled_rows=tensors["sampled_rows"],
            drawn_rows=tensors.get("drawn_rows"),
            adapters=RowSlots(self.runs, tensors["adapters"]) if "adapters" in tensors else None,
            is_repeatable=self.is_repeatable,
            extra=extra,
            scaling_pass=scaling_pass,
        )


class BatchPacker:
    """Packs one pass. While a request keeps its row, only new blocks are written to its block tables."""

    def __init__(
        self,
        block_size: int,
        device: BatchDevice,
        padding_block: int,
        cross_states: Mapping[bytes, Tensor],
        num_columns: int,
        number: int,
        *,
        has_states: bool,
    ) -> None:
        self._number, self._has_states = number, has_states
        self._cross_states = cross_states
        self._num_columns, self._first_table = num_columns, number * num_columns
        self._block_size = block_size
        self._device = device
        self._padding_block = padding_block
        self._padding_tables: dict[int, list[array[int]]] = {}
        self._token_ids, self._positions = np.empty((2, 0), np.int64)
        self._slots = np.empty((num_columns, 0), np.int64)
        self._tables = np.zeros((num_columns, 0, 0), np.int32)
        # tables, their total blocks, and the blocks of each
        self._rows: list[tuple[list[array[int]] | None, int, list[int]]] = []

    def pack(
        self,
        scheduled: Sequence[ScheduledRequest],
        drawn: Mapping[str, int],
        adapters: Sequence[int],
        *,
        rounds_width: bool,
    ) -> PackedBatch:
        """rounds_width: also round the block tables' width for decodes."""
        counts = [request.num_tokens for request in scheduled]
        context_lens = [request.start + request.num_tokens for request in scheduled]
        states = [request.state for request in scheduled]
        others = [state for state in states if not state.is_plain_text]
        num_tokens, num_decodes = sum(counts), counts.count(1)
        has_cross = bool(others) and any([state.cross_key for state in others])
        padded = None if has_cross else self._device.padded_rows(num_tokens, num_decodes)
        decodes_only = num_decodes == len(counts)
        is_mixed = padded is not None and 0 < num_decodes < len(counts)
        padding_counts = [] if padded is None else _padding_counts(counts, num_decodes, padded - num_tokens)
        num_rows = num_tokens + sum(padding_counts)
        width = max([len(state.block_tables[self._first_table]) for state in states])
        if padded is not None:
            width = max(width, *map(self._num_blocks, padding_counts), 1)
            if rounds_width or not decodes_only:
                width = captured_width(width, is_mixed=is_mixed)
        self._reserve(num_rows, len(counts) + len(padding_counts), width)
        self._keep_all_tables(states)
        ends = np.array(counts).cumsum()
        self._place(counts, context_lens, states if others else ())
        image_rows = self._write_tokens(scheduled, num_tokens)
        if padding_counts:
            self._pad(num_tokens, len(counts), padding_counts)
            context_lens, counts = context_lens + padding_counts, counts + padding_counts
        positions, num_positions = self._positions[:num_rows], 0
        if any(map(_has_grid, others)):
            positions, num_positions = _in_grids(scheduled, positions, decodes_only=decodes_only)
        segments = _segments(scheduled, padding_counts, self._number) if self._has_states else None
        shaped = self._shaped(counts, context_lens, positions, segments, num_decodes if is_mixed else None)
        runs: Sequence[Run] = ()
        if adapters:
            runs, shaped["adapters"] = slots_of_rows((*adapters, *[-1] * len(padding_counts)), tuple(counts))
        varying = {"sampled_rows": _sampled_rows(scheduled, ends)}
        if scheduled[0].pending:
            varying["drawn_rows"] = np.zeros(num_rows, np.int64)
            # a request that failed in the previous step has no token
            varying["drawn_rows"][:num_tokens] = [drawn.get(state.request_id, 0) for state in states]
        return PackedBatch(
            parts=(shaped, {"block_tables": self._tables[:, : len(counts), :width]}, varying),
            query_lens=counts,
            context_lens=context_lens,
            num_decodes=num_decodes + (len(padding_counts) if decodes_only else 0),
            runs=runs,
            image_rows=image_rows,
            bidirectional=_bidirectional_rows(scheduled, ends) if others else [],
            num_positions=num_positions,
            cross=self._cross_rows(scheduled, ends) if has_cross else [],
            segments=segments,
            wanted=None if decodes_only else _sampling_once(scheduled),
            is_repeatable=padded is not None,
        )

    def _shaped(
        self,
        counts: list[int],
        context_lens: list[int],
        positions: np.ndarray,
        segments: Segments | None,
        num_decodes: int | None,
    ) -> dict[str, np.ndarray]:
        num_rows = positions.shape[-1]
        shaped: dict[str, np.ndarray] = {
            "query_starts": np.array([0, *itertools.accumulate(counts)], np.int32),
            "context_lens": np.asarray(context_lens, np.int32),
            "slot_mapping": self._slots[:, :num_rows],
            "token_ids": self._token_ids[:num_rows],
            "positions": positions,
        }
        if segments is not None:
            shaped |= {f"segment {name}": array for name, array in segments._asdict().items() if array is not None}
        if num_decodes is not None:
            shaped["decodes"] = np.asarray([num_decodes], np.int32)
        return shaped

    def _keep_all_tables(self, states: Sequence[RequestState]) -> None:
        for row, state in enumerate(states):
            kept, written, _ = self._rows[row]
            if kept is not state.block_tables or written != state.num_blocks:
                self._keep_tables(row, state.block_tables, state.num_blocks)

    def _place(self, counts: list[int], context_lens: list[int], shifted: Sequence[RequestState]) -> None:
        positions, slots = self._positions[: sum(counts)], self._slots[:, : sum(counts)]
        place_tokens(counts, context_lens, self._tables, self._block_size, positions, slots)
        if shifted and any(offsets := [state.position_offset for state in shifted]):
            positions += np.repeat(offsets, counts)

    def _cross_rows(self, scheduled: Sequence[ScheduledRequest], ends: np.ndarray) -> list[CrossRows]:
        return [
            CrossRows(end - request.num_tokens, end, self._cross_states[request.state.cross_key])
            for end, request in zip(ends.tolist(), scheduled, strict=True)
            if request.state.cross_key is not None
        ]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _pad(self, num_tokens: int, num_sequences: int, counts: list[int]) -> None:
        rows = slice(num_tokens, num_tokens + sum(counts))
        self._token_ids[rows] = self._positions[rows] = 0
        self._slots[:, rows] = self._padding_block * self._block_size
        for row, count in enumerate(counts, num_sequences):
            blocks = self._num_blocks(count)
            if blocks not in self._padding_tables:
                num_tables = self._first_table + self._num_columns
                self._padding_tables[blocks] = [array("i", [self._padding_block] * blocks)] * num_tables
            self._keep_tables(row, self._padding_tables[blocks], 0)

    def _reserve(self, num_tokens: int, num_rows: int, width: int) -> None:
        if num_tokens > len(self._token_ids):
            self._token_ids, self._positions = np.empty((2, num_tokens * 5 // 4), np.int64)
            self._slots = np.empty((self._num_columns, num_tokens * 5 // 4), np.int64)
        _, rows, columns = self._tables.shape
        if num_rows > rows or width > columns:
            shape = max(rows, num_rows * 5 // 4), max(columns, width * 5 // 4 + 1)
            self._tables = np.zeros((self._num_columns, *shape), np.int32)
            self._rows = [(None, 0, [])] * shape[0]

    def _keep_tables(self, row: int, tables: list[array[int]], num_blocks: int) -> None:
        """Write the new blocks of a row. A preempted request has new tables."""
        owner, _, written = self._rows[row]
        own = tables[self._first_table : self._first_table + self._num_columns]
        lens = [len(table) for table in own]
        if owner is not tables:
            self._tables[:, row, min(lens) :] = 0
            written = [0] * len(own)
        for column, (table, start, end) in enumerate(zip(own, written, lens, strict=True)):
            self._tables[column, row, start:end] = table[start:]
        self._rows[row] = tables, num_blocks, lens

    def _write_tokens(self, scheduled: Sequence[ScheduledRequest], num_tokens: int) -> list[ImageRows]:
        token_ids = self._token_ids[:num_tokens]
        image_rows: list[ImageRows] = []
        row = 0
        for request in scheduled:
            state, start, count = request.state, request.start, request.num_tokens
            if count == 1:
                token_ids[row] = 0 if request.pending else state.token_ids[start]
            else:
                token_ids[row : row + count] = state.token_ids[start : start + count] + request.draft_token_ids
            if state.images and start < state.num_prompt_tokens:
                for image in state.images_between(start, start + count):
                    for first, last, offset in image.runs(start, start + count):
                        rows = ImageRows(image.key, row + first - start, row + last - start, offset)
                        token_ids[rows.first : rows.last] = 0
                        image_rows.append(rows)
            row += count
        return image_rows


def _padding_counts(counts: Sequence[int], num_decodes: int, padding: int) -> list[int]:
    """At least one sequence, possibly empty, follows chunks, so captured steps have few numbers of sequences."""
    if num_decodes == len(counts):
        return [1] * padding
    num_empty = captured_sequences(len(counts) + 1) - len(counts) - 1 if num_decodes else 0
    return [padding] + [0] * num_empty


def _segments(scheduled: Sequence[ScheduledRequest], padding_counts: Sequence[int], of_pass: int) -> Segments:
    steps = [(number, request.state_steps) for number, request in enumerate(scheduled)]
    known = [(number, step[of_pass]) for number, step in steps if step is not None]
    chunks = [(request.start, request.start + request.num_tokens) for request in scheduled]
    drafts = {
        number: Drafts(step.draft_place, step.num_accepted, len(scheduled[number].draft_token_ids))
        for number, step in known
        if step.num_accepted or scheduled[number].draft_token_ids
    }
    return Segments.of_chunks(
        chunks + [(0, count) for count in padding_counts],
        [request.state.slots[of_pass] for request in scheduled] + [PADDING_SLOT] * len(padding_counts),
        {number: step.source for number, step in known},
        {number: dict(step.checkpoints) for number, step in known},
        drafts,
    )


def _sampled_rows(scheduled: Sequence[ScheduledRequest], ends: np.ndarray) -> np.ndarray:
    counts = [request.num_sampled for request in scheduled]
    if counts.count(1) == len(counts):
        return ends - 1
    rows = [range(end - count, end) for end, count in zip(ends.tolist(), counts, strict=True)]
    return np.fromiter(itertools.chain.from_iterable(rows), np.int64)


def _sampling_once(scheduled: Sequence[ScheduledRequest]) -> list[int] | None:
    """Return indices of requests that sample one row. None: some sample several, or heads read other rows."""
    for request in scheduled:
        head = request.state.head
        if request.num_sampled > 1 or head is not None:
            return None
    return [number for number, request in enumerate(scheduled) if request.num_sampled]


def _bidirectional_rows(scheduled: Sequence[ScheduledRequest], ends: np.ndarray) -> list[BidirectionalRows]:
    """Return the rows of bidirectional spans, except each last row, which sees the span anyway."""
    rows = []
    for number, (request, end) in enumerate(zip(scheduled, ends.tolist(), strict=True)):
        if not request.state.bidirectional_spans:
            continue
        start, count = request.start, request.num_tokens
        row = end - count - start
        for first, last in request.state.bidirectional_spans:
            begin, stop = max(first, start), min(last - 1, start + count)
            if begin < stop:
                rows.append(BidirectionalRows(number, row + begin, row + stop, last))
    return rows


def _has_grid(state: RequestState) -> bool:
    return bool(state.images) and state.images[0].grid is not None


def _in_grids(
    scheduled: Sequence[ScheduledRequest], positions: np.ndarray, *, decodes_only: bool
) -> tuple[np.ndarray, int]:
    in_grids = _grid_positions(scheduled, positions)
    end = int(in_grids.max()) + 1
    if decodes_only and (in_grids == in_grids[0]).all():
        return in_grids[0], end  # 1-D, so that steps with and without images share a graph
    return in_grids, end


def _grid_positions(scheduled: Sequence[ScheduledRequest], positions: np.ndarray) -> np.ndarray:
    """Return int64 ``[3, tokens]``, 0 for padding rows."""
    result = np.zeros((3, len(positions)), np.int64)
    first = 0
    for request in scheduled:
        rows = slice(first, first + request.num_tokens)
        result[:, rows] = grid_positions(request.state.images, positions[rows])
        first += request.num_tokens
    return result
