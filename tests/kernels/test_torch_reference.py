"""What the reference backend does beyond the contract of all backends."""

from __future__ import annotations

from vlmserve.kernels import torch_reference


def test_decodes_are_padded_only_while_that_is_cheaper_than_another_bucket() -> None:
    cost = torch_reference.BUCKET_COST
    assert torch_reference._bucket_decodes([5, 9, 7], "cpu") == (None, [(0, 3)])
    order, bounds = torch_reference._bucket_decodes([5, cost + 10, 7, cost + 20], "cpu")
    assert (order, bounds) == ([3, 1, 2, 0], [(0, 2), (2, 4)])
