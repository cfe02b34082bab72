"""bfloat16 at the sizes of models' tiles, beside float64: compiled, since the interpreter cuts bfloat16 off."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton import knobs

from tests.attending import attend
from tests.kernels.triton.test_products import BITS, made_for_bfloat16
from vlmserve.kernels.activation import activation
from vlmserve.kernels.ranges import Ranges
from vlmserve.kernels.triton import products, shared_memory
from vlmserve.kernels.triton.attention import TritonAttention
from vlmserve.kernels.triton.encoder import TritonRanges
from vlmserve.kernels.triton.norm import TritonNorm
from vlmserve.kernels.triton.products import TritonLinearKernel, tiling
from vlmserve.layer_specs import AttentionSpec, CacheType

if knobs.runtime.interpret:
    pytest.skip("bfloat16 is not rounded by the interpreter", allow_module_level=True)


def assert_near(result: Tensor, expected: Tensor) -> None:
    """Within what rounding results, of about 1, to bfloat16 makes of them."""
    torch.testing.assert_close(result.cpu().double(), expected, atol=1.5e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("rows", "gated", "kind", "group"),
    [
        (1, True, "plain", 128),
        (9, False, "plain", 128),
        (32, False, "8 bits", 128),
        (100, True, "8 bits", 128),
        (1, True, "4 bits", 128),
        (64, False, "4 bits", 128),
        (9, False, "4 bits", 32),
        (100, True, "4 bits", 32),
    ],
)
def test_tiles_of_a_7b_model(device: torch.device, rows: int, gated: bool, kind: str, group: int) -> None:
    """On fewer outputs and inputs, so that the last tile is not full.

    Each number of rows has its own tile. Warps divide the inputs of small tiles.
    """
    torch.manual_seed(rows)
    shape = (28672 if gated else 4096, 4096)
    weight, numbers = made_for_bfloat16(kind, 300, 1152, device, group)
    x, residual = torch.randn(rows, 1152).bfloat16(), torch.randn(rows, 150 if gated else 300).bfloat16()
    product = TritonLinearKernel(weight, dtype=torch.bfloat16, activation="silu" if gated else None, gated=gated)
    tiles = tiling(BITS[kind], group, *shape, rows, shared=shared_memory.shared_bytes(device))
    expected = x.double() @ numbers.T
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = activation("silu")(gate) * up
    assert_near(product.few(x.to(device), residual.to(device), tiles=tiles), expected + residual.double())


@pytest.mark.parametrize(("kind", "rows"), [("8 bits", 1), ("4 bits", 64)])
def test_norms_between_products_of_a_7b_model(
    device: torch.device, kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(rows)
    first, first_numbers = made_for_bfloat16(kind, 384, 1152, device)
    second, second_numbers = made_for_bfloat16(kind, 300, 384, device)
    x, residual, weight = (torch.randn(*shape).bfloat16() for shape in ((rows, 1152), (rows, 384), (384,)))
    pair = [TritonLinearKernel(matrix, dtype=torch.bfloat16) for matrix in (first, second)]
    shared = shared_memory.shared_bytes(device)
    measured = {
        product.shape(rows): tiling(BITS[kind], 128, outputs, 4096, rows, shared=shared)
        for product, outputs in zip(pair, (4096, 28672), strict=True)
    }
    monkeypatch.setattr(products, "tuned_tilings", lambda on: measured)
    norm = TritonNorm(weight.to(device), None, 1e-5)
    deferred = pair[0].deferring(x.to(device), 30 * residual.to(device), norm)
    assert deferred is not None
    expected = x.double() @ first_numbers.T + 30 * residual.double()
    torch.testing.assert_close(deferred.rows.cpu().double(), expected, atol=1e-2, rtol=1e-2)
    normed = expected * torch.rsqrt(expected.square().mean(1, keepdim=True) + 1e-5) * weight.double()
    assert_near(pair[1].complete(deferred), normed @ second_numbers.T)


def test_many_rows(device: torch.device) -> None:
    torch.manual_seed(0)
    weight, numbers = made_for_bfloat16("4 bits", 300, 256, device)
    bias, x = torch.randn(300).bfloat16(), torch.randn(130, 256).bfloat16()
    result = TritonLinearKernel(weight, bias.to(device), dtype=torch.bfloat16)(x.to(device))
    assert_near(result, x.double() @ numbers.T + bias.double())


@pytest.mark.parametrize(
    ("head_size", "quantized"), [(512, "auto"), (256, "auto"), (80, "int8"), (128, "int8"), (128, "fp8")]
)
def test_attention(device: torch.device, head_size: int, quantized: CacheType) -> None:
    spec = AttentionSpec(8, 2, head_size, head_size**-0.5)
    backend = TritonAttention(cache_type=quantized)
    output, expected = attend(backend, [(400, 1), (37, 1), (90, 70)], spec, 16, torch.bfloat16, device=device)
    assert (output.double() - expected).abs().max() < 0.03


def test_attention_with_all_that_models_ask_for(device: torch.device) -> None:
    spec = AttentionSpec(16, 2, 64, 0.125, window=150, soft_cap=20.0, sinks=tuple(i / 8 for i in range(16)))
    output, expected = attend(
        TritonAttention(), [(300, 1), (200, 90)], spec, 16, torch.bfloat16, bidirectional=[[], [(3, 60, 270)]],
        device=device,
    )  # fmt: skip
    assert (output.double() - expected).abs().max() < 0.03


def test_sliding_windows_of_decodes(device: torch.device) -> None:
    spec = dataclasses.replace(AttentionSpec(4, 4, 128, 128**-0.5), window=1024)
    output, expected = attend(TritonAttention(), [(1100, 1), (3, 1)], spec, 16, torch.bfloat16, device=device)
    assert (output.double() - expected).abs().max() < 0.03


@pytest.mark.parametrize("size", [64, 80])
def test_attention_of_images(device: torch.device, size: int) -> None:
    torch.manual_seed(size)
    lengths = [150, 64, 5] if size != 64 else [64, 30]
    qkv = torch.randn(sum(lengths), 3 * 2 * size).bfloat16()
    ours = TritonRanges(2, size).attend(qkv.to(device), Ranges.of(lengths, device)).cpu()
    parts = []
    for rows in torch.split(qkv.double(), lengths):
        query, key, value = rows.view(len(rows), 3, 2, size).permute(1, 2, 0, 3)
        parts.append(F.scaled_dot_product_attention(query, key, value).transpose(0, 1).flatten(1))
    assert (ours.double() - torch.cat(parts)).abs().max() < 0.03


def test_norms(device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 4096).bfloat16(), torch.randn(4096).bfloat16()
    expected = F.rms_norm(x.double(), (4096,), weight.double(), 1e-5)
    assert_near(TritonNorm(weight.to(device), None, 1e-5)(x.to(device)), expected)
