"""How kernels access memory, counted in the emulator: bank conflicts of shared memory, sectors of global memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton import knobs
from triton.runtime import driver

from tests.attending import attend
from tests.kernels.triton.test_products import BITS, made_for_bfloat16
from vlmserve.kernels.triton import shared_memory
from vlmserve.kernels.triton.attention import TritonAttention
from vlmserve.kernels.triton.products import TritonLinearKernel, tiling
from vlmserve.layer_specs import AttentionSpec, CacheType

if knobs.runtime.interpret:
    pytest.skip("the interpreter counts nothing", allow_module_level=True)

from tests.ptx.driver import Driver, counting

SHAPES = ((28672, 4096), (4096, 4096))
"""Outputs and inputs of Mistral-7B's gates and ups, and of its attention."""
MOST_WAVES = 1.5
"""Times the least. Weights of 4 bits are written to shared memory in twice as many as they would need."""
MOST_SECTORS = 1.2
"""Times the least."""


@pytest.fixture(autouse=True)
def _is_emulated() -> None:
    if not isinstance(driver.active, Driver):
        pytest.skip("a GPU counts nothing")


def counted(found: list[Any], name: str) -> Any:
    """Of the last kernel of this name."""
    return [executable for executable in found if executable.program.name == name][-1].total()


@pytest.mark.parametrize(
    ("kind", "rows", "shape"),
    [
        ("plain", 16, SHAPES[1]),
        ("8 bits", 1, SHAPES[1]),
        ("8 bits", 64, SHAPES[0]),
        ("4 bits", 1, SHAPES[0]),
        ("4 bits", 64, SHAPES[0]),
    ],
)
def test_products_have_few_bank_conflicts(device: torch.device, kind: str, rows: int, shape: tuple[int, int]) -> None:
    """One program of a product."""
    torch.manual_seed(0)
    tiles, gated = (
        tiling(BITS[kind], 128, *shape, rows, shared=shared_memory.shared_bytes(device))._replace(splits=1),
        shape[0] > shape[1],
    )
    weight, _ = made_for_bfloat16(kind, tiles.outputs, 2048, device)
    product = TritonLinearKernel(weight, dtype=torch.bfloat16, activation="silu" if gated else None, gated=gated)
    x = torch.randn(tiles.tokens if rows > 1 else 1, 2048).bfloat16()
    with counting() as found:
        product.few(x.to(device), tiles=tiles)
    count = counted(found, "multiply")
    assert count.executed > 1000
    assert 1000 < count.waves <= MOST_WAVES * count.least_waves
    assert count.sectors <= MOST_SECTORS * count.least_sectors


def test_small_groups_of_4_bits_cost_little_more(device: torch.device) -> None:
    """Groups of 32, the default: instructions of a weight, and bytes of shared memory's waves."""
    torch.manual_seed(0)
    tiles = tiling(4, 32, *SHAPES[0], 1, shared=shared_memory.shared_bytes(device))._replace(splits=1)
    weight, _ = made_for_bfloat16("4 bits", tiles.outputs, 4096, device, group=32)
    with counting() as found:
        TritonLinearKernel(weight, dtype=torch.bfloat16).few(torch.randn(1, 4096).bfloat16().to(device), tiles=tiles)
    count, weights = counted(found, "multiply"), tiles.outputs * 4096
    assert 1 < count.executed * 32 / weights <= 5
    assert 1 < count.waves * 128 / weights <= 8


@pytest.mark.parametrize("quantized", ["auto", "int8", "fp8"])
def test_attention_of_decodes_has_no_bank_conflicts(device: torch.device, quantized: CacheType) -> None:
    spec = AttentionSpec(8, 2, 128, 128**-0.5)
    with counting() as found:
        attend(TritonAttention(cache_type=quantized), [(200, 1)], spec, 16, torch.bfloat16, device=device)
    count = counted(found, "attend_rows")
    assert 1000 < count.waves <= 1.01 * count.least_waves
    assert count.sectors <= MOST_SECTORS * count.least_sectors
