"""The native attention of vision towers, each instruction set of this machine against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.native import built
from vlmserve.devices.cpu import NativeCpuDevice
from vlmserve.kernels.cpu_native import encoder_attention, rotate_heads
from vlmserve.kernels.extension import selected_isa
from vlmserve.layers.encoder_attention import EncoderAttention

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
"""Of values that are drawn from a normal distribution. bfloat16 has 8 bits, as queries, weights and results do."""

pytestmark = built


def random_qkv(images: int, length: int, heads: int, head_size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(images, length, 3 * heads * head_size, generator=generator).to(dtype)


def reference(qkv: Tensor, heads: int) -> Tensor:
    images, length, _ = qkv.shape
    query, key, value = qkv.double().view(images, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


@given(
    images=st.integers(1, 3),
    length=st.integers(1, 100),
    heads=st.integers(1, 4),
    head_size=st.integers(1, 64).map(lambda half: 2 * half),
    dtype=st.sampled_from(list(TOLERANCE)),
    threads=st.sampled_from([1, 2, 7]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
@pytest.mark.usefixtures("isa")
def test_it_is_that_of_float64(
    images: int, length: int, heads: int, head_size: int, dtype: torch.dtype, threads: int, seed: int
) -> None:
    qkv = random_qkv(images, length, heads, head_size, dtype, seed)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        output = encoder_attention(qkv, heads)
    finally:
        torch.set_num_threads(before)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), reference(qkv, heads), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("length", "heads", "head_size"),
    [(577, 2, 64), (82, 6, 32), (257, 1, 88), (23, 2, 64), (24, 3, 80), (33, 1, 72), (256, 2, 128), (271, 1, 96)],
)
@pytest.mark.usefixtures("isa")
def test_it_is_that_of_float64_for_real_towers(length: int, heads: int, head_size: int, dtype: torch.dtype) -> None:
    qkv = random_qkv(2, length, heads, head_size, dtype)
    expected = reference(qkv, heads)
    torch.testing.assert_close(encoder_attention(qkv, heads).double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.usefixtures("isa")
def test_extreme_scores_stay_exact(dtype: torch.dtype) -> None:
    qkv = random_qkv(1, 40, 1, 16, torch.float32)
    qkv[:, :, :16] *= 100
    qkv[:, 7, 16:32] += 50
    qkv = qkv.to(dtype)
    output = encoder_attention(qkv, 1)
    assert output.isfinite().all()
    torch.testing.assert_close(output.double(), reference(qkv, 1), rtol=0, atol=max(1e-3, TOLERANCE[dtype]))


@pytest.mark.usefixtures("isa")
def test_pictures_do_not_see_each_other() -> None:
    qkv = random_qkv(3, 30, 2, 8, torch.float32)
    alone = encoder_attention(qkv[1:2], 2)
    torch.testing.assert_close(encoder_attention(qkv, 2)[1:2], alone, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.usefixtures("isa")
def test_some_queries_equal_rows_of_all(dtype: torch.dtype) -> None:
    qkv = random_qkv(2, 150, 3, 16, dtype)
    whole = encoder_attention(qkv, 3)
    for first, last in ((0, 1), (0, 96), (7, 39), (96, 150), (149, 150), (3, 3)):
        assert torch.equal(encoder_attention(qkv, 3, slice(first, last)), whole[:, first:last])


def test_no_pictures_give_no_outputs() -> None:
    assert encoder_attention(torch.empty(0, 5, 24), 2).shape == (0, 5, 8)


def test_queries_with_gaps_are_rejected() -> None:
    with pytest.raises(ValueError, match="consecutive"):
        encoder_attention(torch.zeros(1, 4, 24), 1, slice(0, 4, 2))


@pytest.mark.parametrize(
    ("qkv", "heads"),
    [(torch.zeros(1, 4, 10), 1), (torch.zeros(1, 4, 24), 3), (torch.zeros(1, 4, 9, dtype=torch.bfloat16), 1)],
)
def test_heads_that_do_not_fit_are_refused(qkv: Tensor, heads: int) -> None:
    with pytest.raises(ValueError, match="cannot share"):
        encoder_attention(qkv, heads)


@pytest.mark.parametrize(("dtype", "head_size"), [(torch.float32, 8), (torch.bfloat16, 8), (torch.bfloat16, 5)])
def test_kernel_does_not_change_the_layer(dtype: torch.dtype, head_size: int) -> None:
    layer = EncoderAttention(3 * head_size, 3, dtype=dtype)
    qkv = random_qkv(2, 17, 3, head_size, dtype)
    plain = layer(qkv)
    layer.arrange(NativeCpuDevice(torch.device("cpu"), selected_isa()))
    torch.testing.assert_close(layer(qkv).double(), plain.double(), rtol=0, atol=TOLERANCE[dtype])


@given(
    rows=st.integers(0, 40),
    heads=st.integers(1, 4),
    head_size=st.integers(1, 40).map(lambda half: 2 * half),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
@pytest.mark.usefixtures("isa")
def test_only_queries_and_keys_are_rotated(
    rows: int, heads: int, head_size: int, dtype: torch.dtype, seed: int
) -> None:
    qkv = random_qkv(1, rows, heads, head_size, dtype, seed)[0]
    angles = torch.randn(rows, 1, head_size // 2, generator=torch.Generator().manual_seed(seed))
    rotated = rotate_heads(qkv.clone(), angles.cos(), angles.sin())
    queries_and_keys, values = qkv.view(rows, 3 * heads, head_size).split([2 * heads, heads], 1)
    turned = torch.polar(torch.ones_like(angles).double(), angles.double()) * torch.complex(
        *(half.double() for half in queries_and_keys.chunk(2, -1))
    )
    expected = torch.cat((torch.cat((turned.real, turned.imag), -1), values.double()), 1).flatten(1)
    rounding = 2**-8 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(rotated.double(), expected, rtol=rounding, atol=1e-5)


def test_angles_that_do_not_fit_are_refused() -> None:
    angles = torch.zeros(4, 1, 8)
    with pytest.raises(ValueError, match="do not fit"):
        rotate_heads(torch.zeros(5, 3 * 16), angles, angles)
    with pytest.raises(ValueError, match="does not fit"):
        rotate_heads(torch.zeros(4, 3 * 16 + 1), angles, angles)
