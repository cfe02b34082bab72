"""Norms, rotary positions and the writing of keys and values, beside float64 and the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.attention import HeadNorms, LayerCache, RotaryRows
from vlmserve.kernels.torch_cache import write
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.kernels.triton.norm import MAX_SIZE, TritonNorm
from vlmserve.kernels.triton.rope import rotate_into_cache
from vlmserve.layer_specs import AttentionSpec, CacheType


def norms_and_exact(size: int, layer: bool, device: torch.device) -> tuple[TritonNorm, Callable[[Tensor], Tensor]]:
    """A norm with random weights, and the same in float64."""
    weight, bias = torch.randn(2, size)
    norm = TritonNorm(weight.to(device), bias.to(device) if layer else None, 1e-5)
    if layer:
        return norm, lambda x: F.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-5)
    return norm, lambda x: F.rms_norm(x.double(), (size,), weight.double(), 1e-5)


def assert_close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.cpu().double(), expected, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 48, 130])
@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
def test_norms_equal_float64(device: torch.device, size: int, layer: bool) -> None:
    torch.manual_seed(size)
    x, residual = torch.randn(2, 3, size) * 5, torch.randn(2, 3, size)
    norm, exact = norms_and_exact(size, layer, device)
    assert_close(norm(x.to(device)), exact(x))
    assert_close(norm.plus(x.to(device), residual.to(device)), exact(x) + residual.double())


@pytest.mark.parametrize("size", [1, 48, 130])
@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("first_layer", [None, False, True], ids=["sums", "sums of rms", "sums of layer"])
def test_norms_of_sums_equal_float64(device: torch.device, size: int, layer: bool, first_layer: bool | None) -> None:
    torch.manual_seed(size)
    # Residuals that are no rows of memory one behind the other.
    x, residual = torch.randn(5, size), torch.randn(size, 5).T
    (norm, exact), first, expected = norms_and_exact(size, layer, device), None, x.double()
    if first_layer is not None:
        first, exact_first = norms_and_exact(size, first_layer, device)
        expected = exact_first(x)
    result = norm.of_sum(x.to(device), residual.to(device), first)
    assert_close(result.rows, expected + residual.double())
    assert_close(result.normed, exact(result.rows.cpu()))
    assert result.rows.is_contiguous()
    assert result.normed.is_contiguous()


def test_sums_are_normed_as_they_are_stored(device: torch.device) -> None:
    """What a norm behind a sum sees is what a layer that reads the sum sees."""
    torch.manual_seed(0)
    x, residual = torch.randn(2, 7, 300).half().to(device)
    norm, _ = norms_and_exact(300, False, device)
    result = norm.of_sum(x, residual)
    assert torch.equal(result.rows, x + residual)
    assert torch.equal(result.normed, norm(result.rows))


def test_norms_read_slices_of_wider_rows(device: torch.device) -> None:
    torch.manual_seed(0)
    qkv, weight = torch.randn(4, 6, 16).half(), torch.randn(16)
    keys = qkv.to(device)[:, 2:5]
    result = TritonNorm(weight.to(device), None, 1e-6)(keys)
    assert result.is_contiguous()
    expected = F.rms_norm(qkv[:, 2:5].double(), (16,), weight.double(), 1e-6)
    torch.testing.assert_close(result.cpu().double(), expected, atol=2e-3, rtol=2e-3)


def test_norms_accept_no_rows_and_reject_long_ones(device: torch.device) -> None:
    norm, none = TritonNorm(torch.ones(8, device=device), None, 1e-6), torch.empty(0, 8, device=device)
    assert norm(none).shape == norm.of_sum(none, none).rows.shape == (0, 8)
    with pytest.raises(ValueError, match="larger than"):
        TritonNorm(torch.ones(MAX_SIZE + 1), None, 1e-6)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """``[tokens, heads, head_size]`` in float64; angles: ``[tokens, size / 2]``."""
    size = 2 * angles.shape[1]
    first, second, rest = x.double().split([size // 2, size // 2, x.shape[2] - size], -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def stored(cache: LayerCache, which: int, slots: Tensor) -> Tensor:
    """``[tokens, kv_heads, head_size]`` as they lie in the cache, in float64."""
    blocks, places = slots // cache.block_size, slots % cache.block_size
    tensor = cache.tensors[which].cpu()[blocks, :, places].double()
    return tensor if cache.scales is None else tensor * cache.scales.cpu()[blocks, :, which, places].double()[..., None]


@pytest.mark.parametrize("rotated_size", [0, 8, 12])
@pytest.mark.parametrize(("by_position", "normed"), [(True, False), (False, False), (True, True)])
def test_rotary_kernel_writes_keys_and_values(
    device: torch.device, rotated_size: int, by_position: bool, normed: bool
) -> None:
    torch.manual_seed(rotated_size)
    spec, tokens = AttentionSpec(6, 2, 12, 1.0), 5
    qkv = torch.randn(tokens, 10 * 12)
    positions, slots = torch.tensor([3, 0, 9, 9, 1]), torch.tensor([17, 4, 2, 30, 11])
    table = torch.randn(10, rotated_size // 2)
    angles = table[positions] if by_position else table[:tokens]
    rope = RotaryRows(table.cos().to(device), table.sin().to(device), positions.to(device) if by_position else None)
    cache = TorchReference().allocate(8, 4, spec, torch.float32, device)
    weights, heads = torch.randn(2, 12), qkv.view(tokens, 10, 12).double()
    norms = HeadNorms(weights[0].to(device), weights[1].to(device), 1e-6) if normed else None
    query = rotate_into_cache(qkv.to(device), rope if rotated_size else None, cache, spec, slots.to(device), norms)
    if normed:
        query_heads, key_heads = (
            F.rms_norm(part, (12,), weight.double(), 1e-6)
            for part, weight in zip((heads[:, :6], heads[:, 6:8]), weights, strict=True)
        )
        heads = torch.cat((query_heads, key_heads, heads[:, 8:]), 1)
    torch.testing.assert_close(
        query.cpu().double().view(tokens, 6, 12), rotated(heads[:, :6], angles.double()), atol=2e-6, rtol=1e-6
    )
    keys, values = stored(cache, 0, slots), stored(cache, 1, slots)
    torch.testing.assert_close(keys, rotated(heads[:, 6:8], angles.double()), atol=2e-6, rtol=1e-6)
    assert torch.equal(values, heads[:, 8:].double())
    untouched = torch.ones(32, dtype=torch.bool)
    untouched[slots] = False
    everywhere = torch.arange(32)[untouched]
    assert not stored(cache, 0, everywhere).any()
    assert not stored(cache, 1, everywhere).any()


@pytest.mark.parametrize("cache_type", ["int8", "fp8"])
def test_8_bits_are_those_of_the_reference(device: torch.device, cache_type: CacheType) -> None:
    torch.manual_seed(0)
    spec, tokens = AttentionSpec(2, 3, 10, 1.0), 6
    qkv = torch.randn(tokens, 8 * 10) * 3
    qkv[1, 20:30] = 0
    qkv[2, 25], qkv[3, 55] = torch.inf, torch.nan
    slots = torch.tensor([5, 0, 19, 7, 12, 3])
    ours = TorchReference(cache_type=cache_type).allocate(5, 4, spec, torch.float32, device)
    theirs = TorchReference(cache_type=cache_type).allocate(5, 4, spec, torch.float32, torch.device("cpu"))
    rotate_into_cache(qkv.to(device), None, ours, spec, slots.to(device))
    rows = ((slots // 4 * 12 + slots % 4)[:, None] + torch.arange(3) * 4).flatten()
    write(theirs, 0, qkv[:, 20:50].view(tokens, 3, 10), rows)
    write(theirs, 1, qkv[:, 50:].view(tokens, 3, 10), rows)
    for our, their in zip(ours.tensors, theirs.tensors, strict=True):
        torch.testing.assert_close(our.cpu(), their, atol=0, rtol=0, equal_nan=True)
