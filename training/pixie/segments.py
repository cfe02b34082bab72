"""Run the decoder over packed rows without padding.

Linear layers get all tokens as one matrix. Attention runs by segments: a segment is the tokens that the questions of
a group share, or one question with its answer. Attention over whole rows computes mostly hidden pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.pixie.model import Decoder, DecoderBlock, rotate, rotations
from training.pixie.rows import PADDING_GROUP
from training.pixie.tokenizer import IMAGE

MAX_PADDING: Final = 24
"""Of a segment to the longest in its bucket, in tokens."""
_HIDDEN: Final = -1e4

Ints = npt.NDArray[np.int64]


class Bucket(NamedTuple):
    """Segments of similar length. Places count tokens of the flat batch."""

    own: Tensor
    """Places of the tokens, ``[segments, length]``; 0 for padding."""
    seen: Tensor
    """Places of the tokens that the segment sees: the shared ones before it, and its own, ``[segments, seen]``."""
    mask: Tensor
    """Added to scores, ``[segments, 1, length, seen]``."""
    is_own: Tensor
    """Which of `own` is no padding, ``[segments, length]``."""


class Flat(NamedTuple):
    """A batch of rows without padding."""

    kept: Tensor
    """Places in the flattened rows."""
    buckets: list[Bucket]
    order: Tensor
    """Indices that bring the outputs of all buckets into the order of `kept`."""


def _segments(groups: Ints, branches: Ints) -> tuple[Ints, list[tuple[Ints, Ints]]]:
    """Find the places in the flattened rows that are no padding, and the segments.

    A segment is the places of its own tokens and of the shared tokens that it sees, counted without padding.
    """
    length = groups.shape[1]
    kept = np.flatnonzero(groups.reshape(-1) != PADDING_GROUP)
    names = np.stack([kept // length, groups.reshape(-1)[kept], branches.reshape(-1)[kept]], 1)
    starts = np.flatnonzero(np.any(np.diff(names, axis=0, prepend=-1), axis=1))
    found: list[tuple[Ints, Ints]] = []
    shared: dict[tuple[int, int], Ints] = {}
    for start, end in zip(starts, [*starts[1:], len(kept)], strict=True):
        row, group, branch = names[start].tolist()
        own = np.arange(start, end)
        found.append((own, shared.get((row, group), own[:0])))
        if branch == 0:
            shared[row, group] = own
    return kept, found


def flatten(groups: Tensor, branches: Tensor, dtype: torch.dtype) -> Flat:
    """Find the segments of packed rows, ``[rows, length]`` each; see `rows.pack`."""
    kept, segments = _segments(groups.numpy(), branches.numpy())
    segments.sort(key=lambda segment: (len(segment[1]) > 0, len(segment[0])))
    buckets, begin = [], 0
    for index in range(1, len(segments) + 1):
        first = segments[begin]
        if index < len(segments):
            one = segments[index]
            alike = (len(one[1]) > 0) == (len(first[1]) > 0)
            if alike and len(one[0]) - len(first[0]) <= MAX_PADDING:
                continue
        buckets.append(_bucket(segments[begin:index], dtype))
        begin = index
    order = np.argsort(np.concatenate([own for own, _ in segments]))
    return Flat(torch.from_numpy(kept), buckets, torch.from_numpy(order))


def _bucket(segments: Sequence[tuple[Ints, Ints]], dtype: torch.dtype) -> Bucket:
    length, shared = (max(len(segment[part]) for segment in segments) for part in (0, 1))
    own = np.zeros((len(segments), length), np.int64)
    seen = np.zeros((len(segments), shared + length), np.int64)
    is_own = np.zeros(own.shape, np.bool_)
    visible = np.zeros((len(segments), length, shared + length), np.bool_)
    triangle = np.tri(length, dtype=np.bool_)
    for index, (places, before) in enumerate(segments):
        own[index, : len(places)] = places
        is_own[index, : len(places)] = True
        seen[index, : len(before)], seen[index, shared : shared + len(places)] = before, places
        visible[index, :, : len(before)] = True
        visible[index, :, shared:] = triangle
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~torch.from_numpy(visible), _HIDDEN)
    return Bucket(torch.from_numpy(own), torch.from_numpy(seen), mask[:, None], torch.from_numpy(is_own))


def attend(query: Tensor, key: Tensor, value: Tensor, bucket: Bucket) -> Tensor:
    """Attention of a bucket's tokens: ``[tokens that are no padding, width]``. query: ``[tokens, heads, size]``; key,
    value: ``[tokens, heads of keys, size]``."""
    count, length = bucket.own.shape
    heads, size = key.shape[1:]
    q = query.index_select(0, bucket.own.flatten()).view(count, length, heads, -1, size)
    q = q.permute(0, 2, 3, 1, 4).reshape(count * heads, -1, size)
    k, v = (part.index_select(0, bucket.seen.flatten()).view(count, -1, heads, size) for part in (key, value))
    k = k.permute(0, 2, 3, 1).reshape(count * heads, size, -1)
    v = v.permute(0, 2, 1, 3).reshape(count * heads, -1, size)
    scores = torch.bmm(q, k).view(count, -1, length, k.shape[-1]) + bucket.mask
    weights = scores.softmax(-1).view(count * heads, -1, k.shape[-1])
    attended = torch.bmm(weights, v).view(count, heads, -1, length, size).permute(0, 3, 1, 2, 4)
    return attended.reshape(count, length, -1)[bucket.is_own]


def _block(block: DecoderBlock, x: Tensor, flat: Flat, cos: Tensor, sin: Tensor, said: Tensor | None) -> Tensor:
    """A layer; `said`: the tokens whose output is wanted, None: all."""
    size = cos.shape[-1] * 2
    h = block.norm1(x)
    query = rotate(block.q(h).view(len(x), -1, size), cos, sin) * size**-0.5
    key = rotate(block.k(h).view(len(x), -1, size), cos, sin)
    value = block.v(h).view(len(x), -1, size)
    parts = [attend(query, key, value, bucket) for bucket in flat.buckets]
    attended = torch.cat(parts).index_select(0, flat.order)
    if said is not None:
        x, attended = x[said], attended[said]
    x = x + block.o(attended)
    h = block.norm2(x)
    return x + block.down(F.silu(block.gate(h)) * block.up(h))


class SegmentDecoder(nn.Module):
    """Runs a `Decoder`, whose parameters it has, by segments."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, tokens: Tensor, positions: Tensor, groups: Tensor, branches: Tensor, features: Tensor, said: Tensor
    ) -> Tensor:
        """Return what `Decoder.forward` does for the same arguments."""
        decoder = self.decoder
        flat = flatten(groups, branches, features.dtype)
        ids, places, spoken = (part.flatten()[flat.kept] for part in (tokens, positions, said))
        x = decoder.embeddings(ids)
        if len(features):
            x = x.masked_scatter((ids == IMAGE)[:, None], decoder.project(features).reshape(-1, x.shape[-1]))
        cos, sin = rotations(places, x.dtype)
        last = len(decoder.blocks) - 1
        for index, block in enumerate(decoder.blocks):
            x = _block(block, x, flat, cos, sin, spoken if index == last else None)
        return F.linear(decoder.norm(x), decoder.embeddings.weight)
