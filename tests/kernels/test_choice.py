"""What the choice of kernels knows of the processor."""

from __future__ import annotations

import pytest
import torch

from vlmserve.kernels.choice import multiplies_bfloat16


@pytest.mark.parametrize(
    ("capability", "features", "expected"),
    [
        ("AVX512", {"avx512_bf16": True}, True),
        ("AVX512", {"avx512_bf16": False, "amx_bf16": True}, True),
        ("AVX512", {"avx512_bf16": False}, False),
        ("AVX2", {"avx512_bf16": True}, False),
        ("DEFAULT", {"bf16": True}, True),
    ],
    ids=["avx512_bf16", "amx", "avx512", "held to AVX2", "Arm"],
)
def test_products_of_bfloat16_are_what_torch_may_use(
    capability: str, features: dict[str, bool], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
    assert multiplies_bfloat16.__wrapped__() is expected
