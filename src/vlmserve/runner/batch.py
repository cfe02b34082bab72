"""From a scheduled step to the tensors of one flat batch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlmserve.kernels.attention import BatchMetadata, WideRows
from vlmserve.models.grid_positions import grid_positions
from vlmserve.scheduler.scheduler import ScheduledChunk, Step


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows ``first <= row < last`` of a batch take a picture's embeddings, from its row `offset` on."""

    key: bytes
    first: int
    last: int
    offset: int


@dataclass(frozen=True, slots=True)
class LookingRows:
    """Rows ``first <= row < last`` of a batch look at what has this key."""

    key: bytes
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as tensors on the model's device.

    token_ids, positions: int64 ``[tokens]``; positions of long sequences are behind those of short ones; placeholders
    of pictures have token id 0, `image_rows` says whose they are. Where pictures have grids, positions are ``[3,
    tokens]``: frames, rows and columns. sampled_rows: int64, the rows after which a token is sampled, in the order of
    the chunks. looking: which rows look at what, by cross attention.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: BatchMetadata
    image_rows: list[ImageRows]
    sampled_rows: Tensor
    looking: list[LookingRows]


class BatchBuilder:
    """Packs the chunks of a step into one batch, in memory that it keeps: a batch is valid until the next is built.

    Block tables stay where they are from step to step: while a sequence keeps its row, only its new blocks are written.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._token_ids, self._positions, self._slots = np.empty((3, 0), np.int64)
        self._tables = np.zeros((0, 0), np.int32)
        # Which table each row holds, and how many blocks of it.
        self._rows: list[tuple[array[int] | None, int]] = []

    def build(self, step: Step) -> Batch:
        """The batch of a step that has at least one chunk."""
        counts = [chunk.num_tokens for chunk in step.chunks]
        starts = [chunk.sequence.num_computed for chunk in step.chunks]
        context_lens = [start + count for start, count in zip(starts, counts, strict=True)]
        num_tokens, width = sum(counts), max(len(chunk.sequence.block_table) for chunk in step.chunks)
        self._reserve(num_tokens, len(counts), width)
        for row, chunk in enumerate(step.chunks):
            self._keep_table(row, chunk.sequence.block_table)
        ends = np.cumsum(counts)
        sequence = np.repeat(np.arange(len(counts)), counts)
        positions, slots = self._positions[:num_tokens], self._slots[:num_tokens]
        np.subtract(np.arange(num_tokens), (ends - context_lens)[sequence], out=positions)
        np.multiply(self._tables[sequence, positions // self._block_size], self._block_size, out=slots, dtype=np.int64)
        slots += positions % self._block_size
        if any(offsets := [chunk.sequence.position_offset for chunk in step.chunks]):
            positions += np.repeat(offsets, counts)
        in_grids = _grid_positions(step, positions) if any(_has_grid(chunk) for chunk in step.chunks) else positions
        token_ids, image_rows = self._write_tokens(step, num_tokens)
        sampled = [end - 1 for end, chunk in zip(ends, step.chunks, strict=True) if chunk.samples]
        metadata = BatchMetadata(
            query_starts=self._tensor(np.concatenate(([0], ends)).astype(np.int32)),
            context_lens=self._tensor(np.asarray(context_lens, np.int32)),
            block_tables=self._tensor(self._tables[: len(counts), :width]),
            slot_mapping=self._tensor(slots),
            query_lens=counts,
            host_context_lens=context_lens,
            num_decodes=counts.count(1),
            wide=_wide_rows(step, ends),
            num_positions=int(in_grids.max()) + 1 if in_grids.ndim > 1 else 0,
        )
        return Batch(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(in_grids),
            metadata=metadata,
            image_rows=image_rows,
            sampled_rows=self._tensor(np.asarray(sampled, np.int64)),
            looking=[
                LookingRows(chunk.sequence.cross_key, int(end) - chunk.num_tokens, int(end))
                for end, chunk in zip(ends, step.chunks, strict=True)
                if chunk.sequence.cross_key is not None
            ],
        )

    def _reserve(self, num_tokens: int, num_rows: int, width: int) -> None:
        """Make sure that there is memory for a batch of these sizes, and for some that are a little larger."""
        if num_tokens > len(self._token_ids):
            self._token_ids, self._positions, self._slots = np.empty((3, num_tokens * 5 // 4), np.int64)
        rows, columns = self._tables.shape
        if num_rows > rows or width > columns:
            shape = max(rows, num_rows * 5 // 4), max(columns, width * 5 // 4 + 1)
            self._tables = np.zeros(shape, np.int32)
            self._rows = [(None, 0)] * shape[0]

    def _keep_table(self, row: int, table: array[int]) -> None:
        """Write what a row lacks of a table. A sequence that starts over has another table."""
        owner, written = self._rows[row]
        if owner is table and written == len(table):
            return
        if owner is not table:
            self._tables[row, len(table) :] = 0
            written = 0
        self._tables[row, written : len(table)] = table[written:]
        self._rows[row] = table, len(table)

    def _write_tokens(self, step: Step, num_tokens: int) -> tuple[np.ndarray, list[ImageRows]]:
        token_ids = self._token_ids[:num_tokens]
        image_rows: list[ImageRows] = []
        row = 0
        for sequence, count, _ in step.chunks:
            start = sequence.num_computed
            if count == 1:
                token_ids[row] = sequence.token_ids[start]
            else:
                token_ids[row : row + count] = sequence.token_ids[start : start + count]
            if sequence.image_spans and start < sequence.num_prompt_tokens:
                for span in sequence.spans_between(start, start + count):
                    for first, last, offset in span.runs(start, start + count):
                        rows = ImageRows(span.image.key, row + first - start, row + last - start, offset)
                        token_ids[rows.first : rows.last] = 0
                        image_rows.append(rows)
            row += count
        return token_ids, image_rows

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _wide_rows(step: Step, ends: np.ndarray) -> list[WideRows]:
    """Rows of tokens that see each other, but for the last of each range, which sees all of them anyway."""
    wide = []
    for number, ((sequence, count, _), end) in enumerate(zip(step.chunks, ends.tolist(), strict=True)):
        start = sequence.num_computed
        row = end - count - start
        for first, last in sequence.whole_ranges:
            begin, stop = max(first, start), min(last - 1, start + count)
            if begin < stop:
                wide.append(WideRows(number, row + begin, row + stop, last))
    return wide


def _has_grid(chunk: ScheduledChunk) -> bool:
    spans = chunk.sequence.image_spans
    return bool(spans) and spans[0].image.grid is not None


def _grid_positions(step: Step, positions: np.ndarray) -> np.ndarray:
    """int64 ``[3, tokens]`` from positions that count tokens."""
    result = np.empty((3, len(positions)), np.int64)
    first = 0
    for sequence, count, _ in step.chunks:
        result[:, first : first + count] = grid_positions(sequence.image_spans, positions[first : first + count])
        first += count
    return result
