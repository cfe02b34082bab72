"""What the choice of kernels knows of the processor."""

from __future__ import annotations

import subprocess
import sys

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


@pytest.mark.skipif(not choice.has_onednn(), reason="this build of torch has no oneDNN")
def test_onednn_restricted_to_avx2_allows_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # oneDNN reads it once in a process
    code = "from vlmserve.kernels.choice import onednn_allows_bfloat16; raise SystemExit(onednn_allows_bfloat16())"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_torch_without_onednn_may_use_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_onednn", lambda: False)
    assert choice.onednn_allows_bfloat16()
