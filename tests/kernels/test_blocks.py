from __future__ import annotations

import torch

from vlmserve.kernels.blocks import allocate_zeros, populate


def test_contents_stay_when_memory_is_given() -> None:
    blocks = allocate_zeros((600, 1000), torch.float32, torch.device("cpu"))
    blocks[3] = 7.0
    populate(blocks[1:], 500)
    assert blocks[3].eq(7).all()
    assert blocks.sum() == 7000
