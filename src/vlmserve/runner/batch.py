"""From a scheduled step to the tensors of one flat batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlmserve.kernels.attention import BatchMetadata
from vlmserve.scheduler.scheduler import Step


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows ``first <= row < last`` of a batch take a picture's embeddings, from its row `offset` on."""

    key: bytes
    first: int
    last: int
    offset: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as tensors on the model's device.

    token_ids, positions: int64 ``[tokens]``; placeholders of pictures have token id 0, `image_rows` says whose they
    are. sampled_rows: int64, the rows after which a token is sampled, in the order of the chunks.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: BatchMetadata
    image_rows: list[ImageRows]
    sampled_rows: Tensor


def build_batch(step: Step, block_size: int, device: torch.device) -> Batch:
    """Pack the chunks of a step, which has at least one, into one batch."""
    num_tokens = sum(chunk.num_tokens for chunk in step.chunks)
    width = max(len(chunk.sequence.block_table) for chunk in step.chunks)
    token_ids = np.empty(num_tokens, np.int64)
    positions = np.empty(num_tokens, np.int64)
    slots = np.empty(num_tokens, np.int64)
    block_tables = np.zeros((len(step.chunks), width), np.int32)
    image_rows: list[ImageRows] = []
    sampled_rows: list[int] = []
    row = 0
    for index, chunk in enumerate(step.chunks):
        sequence, count = chunk.sequence, chunk.num_tokens
        start = sequence.num_computed
        table = np.frombuffer(sequence.block_table, np.int32)
        block_tables[index, : len(table)] = table
        if count == 1:
            token_ids[row] = sequence.token_ids[start]
            positions[row] = start
            slots[row] = sequence.block_table[start // block_size] * block_size + start % block_size
        else:
            place = np.arange(start, start + count)
            token_ids[row : row + count] = sequence.token_ids[start : start + count]
            positions[row : row + count] = place
            slots[row : row + count] = table[place // block_size].astype(np.int64) * block_size + place % block_size
        if sequence.image_spans:
            for span in sequence.spans_between(start, start + count):
                first, last = max(span.start, start), min(span.end, start + count)
                image_rows.append(
                    ImageRows(span.image.key, row + first - start, row + last - start, first - span.start)
                )
                token_ids[row + first - start : row + last - start] = 0
        row += count
        if chunk.samples:
            sampled_rows.append(row - 1)
    query_lens = [chunk.num_tokens for chunk in step.chunks]
    context_lens = [chunk.sequence.num_computed + chunk.num_tokens for chunk in step.chunks]
    metadata = BatchMetadata(
        query_starts=_tensor(np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32), device),
        context_lens=_tensor(np.asarray(context_lens, np.int32), device),
        block_tables=_tensor(block_tables, device),
        slot_mapping=_tensor(slots, device),
        query_lens=query_lens,
        host_context_lens=context_lens,
        num_decodes=sum(length == 1 for length in query_lens),
    )
    return Batch(
        token_ids=_tensor(token_ids, device),
        positions=_tensor(positions, device),
        metadata=metadata,
        image_rows=image_rows,
        sampled_rows=_tensor(np.asarray(sampled_rows, np.int64), device),
    )


def _tensor(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
