"""Which rank encodes which images of a step, and how all ranks get the embeddings of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmserve.layers.parallel import Ranks


def divide(costs: Sequence[int], count: int) -> list[list[int]]:
    """For each of `count` ranks the indices of its images, in order; the same in all ranks.

    The most expensive image goes first, each to the rank that has least to do (Graham 1969). costs: multiplications of
    each image.
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
    """The embeddings of all images, in their order, ``[lengths[i], width]`` each; views of what ranks have gathered.

    own: those of this rank's share, in its order. lengths: embeddings of each image.
    """
    sizes = [[lengths[index] for index in share] for share in shares]
    padded = torch.zeros((max(map(sum, sizes)), width), dtype=dtype, device=device)
    if own:
        padded[: sum(sizes[ranks.rank])] = torch.cat(list(own))
    # As bytes, which every backend exchanges, whatever the type is.
    parts = [part.view(dtype) for part in ranks.gather(padded.view(torch.uint8))]
    found: dict[int, Tensor] = {}
    for part, share, size in zip(parts, shares, sizes, strict=True):
        found |= zip(share, torch.split(part[: sum(size)], size), strict=True)
    return [found[index] for index in range(len(lengths))]
