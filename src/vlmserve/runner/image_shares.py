"""Shard a step's images across ranks, and gather the embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmserve.layers.parallel import Ranks


def divide(costs: Sequence[int], count: int) -> list[list[int]]:
    """Assign images to ranks: sorted indices, equal on all ranks. costs: MACs.

    Each image goes to the least loaded rank, most expensive first (Graham 1969).
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = min(range(count), key=lambda rank: (loads[rank], rank))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return [sorted(share) for share in shares]


def exchange(
    own: Sequence[Tensor],
    shares: Sequence[Sequence[int]],
    lengths: Sequence[int],
    ranks: Ranks,
    *,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Gather the embeddings of all images, ``[lengths[i], width]``, as views. own: in the order of this rank's
    share.
    """
    sizes = [[lengths[index] for index in share] for share in shares]
    padded = torch.zeros((max(map(sum, sizes)), width), dtype=dtype, device=device)
    if own:
        padded[: sum(sizes[ranks.rank])] = torch.cat(list(own))
    # every backend can exchange bytes
    parts = [part.view(dtype) for part in ranks.gather(padded.view(torch.uint8))]
    found: dict[int, Tensor] = {}
    for part, share, size in zip(parts, shares, sizes, strict=True):
        found |= zip(share, torch.split(part[: sum(size)], size), strict=True)
    return [found[index] for index in range(len(lengths))]
