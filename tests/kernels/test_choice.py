"""What the choice of kernels knows of the processor."""

from __future__ import annotations

import pytest
import torch

from vlmserve.kernels import choice


@pytest.mark.parametrize(
    ("computes", "features", "expected"),
    [
        (True, {"avx512_bf16": True}, True),
        (True, {"avx512_bf16": False, "amx_bf16": True}, True),
        (True, {"avx512_bf16": False}, False),
        (False, {"avx512_bf16": True}, False),
        (True, {"bf16": True}, True),
    ],
    ids=["avx512_bf16", "amx", "avx512", "oneDNN held to less", "Arm"],
)
def test_products_of_bfloat16_are_what_torch_may_use(
    computes: bool, features: dict[str, bool], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "onednn_allows_bfloat16", lambda: computes)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
    assert choice.multiplies_bfloat16.__wrapped__() is expected
