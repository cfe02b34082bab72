"""Positions of tokens in Qwen2-VL (https://arxiv.org/abs/2409.12191, section 2.1) and Qwen2.5-VL, written out slowly.

A text token counts all three up by one. An image's or video's tokens begin, all three, behind the highest position
before them, and count its frames (Qwen2.5-VL: in seconds), rows and columns. What follows begins behind the highest of
these. transformers 5 leaves the frames out of "the highest" for what follows in a prompt, though not for what is
generated; the models were trained as written here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Grid = tuple[int, int, int]


def positions(token_ids: Sequence[int], placeholders: set[int], grids: Sequence[tuple[Grid, float]]) -> torch.Tensor:
    """int64 ``[3, 1, tokens]``. grids: frames, rows and columns of embeddings, and positions from frame to frame."""
    rows: list[tuple[int, int, int]] = []
    waiting = list(grids)
    while len(rows) < len(token_ids):
        begin = max(max(row) for row in rows) + 1 if rows else 0
        if token_ids[len(rows)] not in placeholders:
            rows.append((begin, begin, begin))
            continue
        (frames, height, width), step = waiting.pop(0)
        for frame in range(frames):
            for row in range(height):
                for column in range(width):
                    rows.append((begin + int(frame * step), begin + row, begin + column))
    assert not waiting
    return torch.tensor(rows).T[:, None]
