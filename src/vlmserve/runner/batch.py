"""From the requests of a step to the tensors of one flat batch."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from vlmserve.devices.device import Device
from vlmserve.devices.graphs import captured_sequences, captured_width
from vlmserve.devices.staging import Staging
from vlmserve.kernels.adapters import RowSlots, Run, slots_of_rows
from vlmserve.kernels.attention import BatchMetadata, BidirectionalRows, CrossRows, place_tokens
from vlmserve.models.grid_positions import grid_positions
from vlmserve.models.image_rows import ImageRows
from vlmserve.runner.requests import RequestState, ScheduledRequest

_NOTHING_DRAWN: dict[str, int] = {}
_NO_STATES: dict[bytes, Tensor] = {}


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as tensors on the model's device.

    token_ids, positions: int64 ``[tokens]``; positions of long requests come after those of short ones; placeholders
    of images have token id 0, `image_rows` says to which images they belong. Where images have grids, positions are
    ``[3, tokens]``: frames, rows and columns. sampled_rows: int64, the rows whose next token may be sampled, in the
    order of the requests. drawn_rows: int64
    ``[tokens]``: which of the tokens that the step before draws each row is; None: the tokens are known. adapters:
    which rows have which adapter, those that only pad none; None: none has. further: what else was uploaded.
    is_repeatable: whether the device may have captured such a step, which is padded then.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: BatchMetadata
    image_rows: list[ImageRows]
    sampled_rows: Tensor
    drawn_rows: Tensor | None = None
    adapters: RowSlots | None = None
    further: Sequence[Tensor] = ()
    is_repeatable: bool = False


class BatchDevice(Protocol):
    """What a `Device` does for batches."""

    padding_blocks: int

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """See `Device.upload`."""
        ...

    def padded_rows(self, num_rows: int, num_decodes: int) -> int | None:
        """See `Device.padded_rows`."""
        ...


class OtherMemory:
    """A `BatchDevice` for batches that are computed while another one lies in the memory through which a device gets
    its batches."""

    def __init__(self, device: Device) -> None:
        self.padding_blocks, self.padded_rows = device.padding_blocks, device.padded_rows
        self.upload = Staging(device.torch_device).upload


class BatchBuilder:
    """Packs a step's requests into one batch, in memory that it keeps: a batch is valid until the next is built.

    Block tables stay where they are from step to step: while a request keeps its row, only its new blocks are written.
    """

    def __init__(
        self,
        block_size: int,
        device: BatchDevice,
        padding_block: int = 0,
        cross_states: Mapping[bytes, Tensor] = _NO_STATES,
        num_columns: int = 1,
        first_table: int = 0,
    ) -> None:
        """padding_block: which block rows that only pad a batch write to and read from. cross_states: by key, what is
        in memory at each step. num_columns: see `CacheLayout`. first_table: the first of the pass's block tables."""
        self._cross_states = cross_states
        self._num_columns, self._first_table = num_columns, first_table
        self._block_size = block_size
        self._device = device
        self._padding_block = padding_block
        self._padding_tables: dict[int, list[array[int]]] = {}
        self._token_ids, self._positions = np.empty((2, 0), np.int64)
        self._slots = np.empty((num_columns, 0), np.int64)
        self._tables = np.zeros((num_columns, 0, 0), np.int32)
        # Which tables each row holds, and how many blocks of them, in all and of each table.
        self._rows: list[tuple[list[array[int]] | None, int, list[int]]] = []

    def build(
        self,
        scheduled: Sequence[ScheduledRequest],
        drawn: Mapping[str, int] = _NOTHING_DRAWN,
        further: Sequence[np.ndarray] = (),
        adapters: Sequence[int] = (),
    ) -> Batch:
        """The batch of at least one request.

        drawn: by request, which of the tokens that the step before draws is its; asked for where they are pending:
        either all are, or none. further: arrays to upload along. adapters: the slot of each request's adapter, below 0
        for none; empty: no request has one.
        """
        counts = [request.num_tokens for request in scheduled]
        context_lens = [request.start + request.num_tokens for request in scheduled]
        states = [request.state for request in scheduled]
        others = [state for state in states if not state.is_plain_text]
        num_tokens = sum(counts)
        width = max([len(state.block_tables[self._first_table]) for state in states])
        num_decodes = counts.count(1)
        has_cross = any([state.cross_key for state in others])
        padded = None if has_cross else self._device.padded_rows(num_tokens, num_decodes)
        padding = 0 if padded is None else padded - num_tokens
        decodes_only = num_decodes == len(counts)
        is_mixed = padded is not None and 0 < num_decodes < len(counts)
        padding_counts: list[int] = []
        if padded is not None:
            # Chunks always have a sequence behind them, if only of no rows. The number of sequences and a table's width
            # are part of shapes, and few shapes are to come.
            padding_counts = [1] * padding if decodes_only else [padding]
            if is_mixed:
                padding_counts += [0] * (captured_sequences(len(counts) + 1) - len(counts) - 1)
            width = max(width, *map(self._num_blocks, padding_counts), 1)
            if not decodes_only:
                width = captured_width(width, is_mixed=is_mixed)
        self._reserve(num_tokens + padding, len(counts) + len(padding_counts), width)
        for row, state in enumerate(states):
            kept, written, _ = self._rows[row]
            if kept is not state.block_tables or written != state.num_blocks:
                self._keep_tables(row, state.block_tables, state.num_blocks)
        ends = np.cumsum(counts)
        positions, slots = self._positions[:num_tokens], self._slots[:, :num_tokens]
        place_tokens(counts, context_lens, self._tables, self._block_size, positions, slots)
        if others and any(offsets := [state.position_offset for state in states]):
            positions += np.repeat(offsets, counts)
        token_ids, image_rows = self._write_tokens(scheduled, num_tokens)
        if padding_counts:
            self._pad(num_tokens, len(counts), padding_counts)
            context_lens, counts = context_lens + padding_counts, counts + padding_counts
            token_ids, slots = self._token_ids[: num_tokens + padding], self._slots[:, : num_tokens + padding]
        in_grids = self._positions[: num_tokens + padding]
        num_positions = 0
        if any(map(_has_grid, others)):
            in_grids = _grid_positions(scheduled, in_grids)
            num_positions = int(in_grids.max()) + 1
            if decodes_only and (in_grids == in_grids[0]).all():
                in_grids = in_grids[0]  # as in steps without images, so that one graph serves both
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        arrays: list[np.ndarray] = [starts, np.asarray(context_lens, np.int32), slots, token_ids, in_grids]
        if is_mixed:
            arrays.append(np.asarray([num_decodes], np.int32))
        runs: Sequence[Run] = ()
        if adapters:
            runs, adapted = slots_of_rows((*adapters, *[-1] * len(padding_counts)), tuple(counts))
            arrays.append(adapted)
        # The size of what comes from here on does not move what a captured step of decodes reads: it finds the tables
        # at the same address however wide they are, and the number of sampled rows is no part of its shapes.
        arrays += [self._tables[:, : len(counts), :width], _sampled_rows(scheduled, ends)]
        pending = scheduled[0].pending
        if pending:
            # What failed in the step before has drawn nothing, and is computed in vain.
            sources = [drawn.get(state.request_id, 0) for state in states]
            arrays.append(np.asarray(sources + [0] * padding, np.int64))
        uploaded = iter(self._device.upload([*arrays, *further]))
        query_starts, contexts, slot_mapping, tokens, places = itertools.islice(uploaded, 5)
        decodes = next(uploaded) if is_mixed else None
        row_slots = RowSlots(runs, next(uploaded)) if adapters else None
        block_tables = next(uploaded)
        metadata = BatchMetadata(
            query_starts=query_starts,
            context_lens=contexts,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            query_lens=counts,
            host_context_lens=context_lens,
            num_decodes=num_decodes + (len(padding_counts) if decodes_only else 0),
            bidirectional=_bidirectional_rows(scheduled, ends) if others else [],
            num_positions=num_positions,
            cross=self._cross_rows(scheduled, ends) if has_cross else [],
            decodes=decodes,
        )
        return Batch(
            token_ids=tokens,
            positions=places,
            metadata=metadata,
            image_rows=image_rows,
            sampled_rows=next(uploaded),
            drawn_rows=next(uploaded) if pending else None,
            adapters=row_slots,
            further=[*uploaded],
            is_repeatable=padded is not None,
        )

    def _cross_rows(self, scheduled: Sequence[ScheduledRequest], ends: np.ndarray) -> list[CrossRows]:
        return [
            CrossRows(end - request.num_tokens, end, self._cross_states[request.state.cross_key])
            for end, request in zip(ends.tolist(), scheduled, strict=True)
            if request.state.cross_key is not None
        ]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _pad(self, num_tokens: int, num_sequences: int, counts: list[int]) -> None:
        """Append padding sequences, which have `counts` rows and write to the padding block."""
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
        """Allocate memory for a batch of these sizes, with some to spare for larger ones."""
        if num_tokens > len(self._token_ids):
            self._token_ids, self._positions = np.empty((2, num_tokens * 5 // 4), np.int64)
            self._slots = np.empty((self._num_columns, num_tokens * 5 // 4), np.int64)
        _, rows, columns = self._tables.shape
        if num_rows > rows or width > columns:
            shape = max(rows, num_rows * 5 // 4), max(columns, width * 5 // 4 + 1)
            self._tables = np.zeros((self._num_columns, *shape), np.int32)
            self._rows = [(None, 0, [])] * shape[0]

    def _keep_tables(self, row: int, tables: list[array[int]], num_blocks: int) -> None:
        """Write the new blocks of a row's block tables in this pass. A preempted request has new tables.

        tables, num_blocks: of all passes.
        """
        owner, _, written = self._rows[row]
        own = tables[self._first_table : self._first_table + self._num_columns]
        lens = [len(table) for table in own]
        if owner is not tables:
            self._tables[:, row, min(lens) :] = 0
            written = [0] * len(own)
        for column, (table, start, end) in enumerate(zip(own, written, lens, strict=True)):
            self._tables[column, row, start:end] = table[start:]
        self._rows[row] = tables, num_blocks, lens

    def _write_tokens(
        self, scheduled: Sequence[ScheduledRequest], num_tokens: int
    ) -> tuple[np.ndarray, list[ImageRows]]:
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
        return token_ids, image_rows


def _sampled_rows(scheduled: Sequence[ScheduledRequest], ends: np.ndarray) -> np.ndarray:
    counts = [request.num_sampled for request in scheduled]
    if counts.count(1) == len(counts):
        return ends - 1
    rows = [range(end - count, end) for end, count in zip(ends.tolist(), counts, strict=True)]
    return np.fromiter(itertools.chain.from_iterable(rows), np.int64)


def _bidirectional_rows(scheduled: Sequence[ScheduledRequest], ends: np.ndarray) -> list[BidirectionalRows]:
    """Rows of bidirectional spans, except the last row of each, which attends to all of its span anyway."""
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


def _grid_positions(scheduled: Sequence[ScheduledRequest], positions: np.ndarray) -> np.ndarray:
    """int64 ``[3, tokens]`` from positions that count tokens; 0 for rows that only pad."""
    result = np.zeros((3, len(positions)), np.int64)
    first = 0
    for request in scheduled:
        rows = slice(first, first + request.num_tokens)
        result[:, rows] = grid_positions(request.state.images, positions[rows])
        first += request.num_tokens
    return result
