"""The native kernels for a CPU, each instruction set of this machine against float64."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.native import built
from tests.oracles.rounded_inputs import DOTS
from vlmserve.errors import ConfigurationError
from vlmserve.kernels import choice, extension
from vlmserve.kernels.activation import ACTIVATIONS
from vlmserve.kernels.choice import choose_kernels
from vlmserve.kernels.cpu_native import NativeNorm, PackedLinear
from vlmserve.kernels.extension import supported_isas
from vlmserve.kernels.quantized import QuantizedWeight

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def assert_close(actual: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """magnitude: what the absolute values would add up to, which bounds how far rounding can carry."""
    sum_unit = 2**-20
    rounding = 2**-21 if actual.dtype == torch.float32 else 2**-8
    error = (actual.double() - expected).abs()
    excess = error - sum_unit * (magnitude + 1) - rounding * expected.abs()
    assert (excess <= 0).all(), (actual.dtype, excess.max())


class LinearKernel(NamedTuple):
    """The sizes of a product and what its numbers are drawn from."""

    rows: int
    in_features: int
    out_features: int
    dtype: torch.dtype
    seed: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs, weight, bias and residual."""
        generator = torch.Generator().manual_seed(self.seed)
        rows, in_features, out_features = self[:3]
        shapes = ((rows, in_features), (out_features, in_features), (out_features,), (rows, out_features))
        x, weight, bias, residual = (torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes)
        return x, weight, bias, residual


products = st.builds(
    LinearKernel,
    st.integers(1, 40),
    st.integers(1, 100).map(lambda pairs: 2 * pairs),
    st.integers(1, 100),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
)


@built
@given(products, st.sampled_from([None, *ACTIVATIONS]))
@settings(max_examples=60, deadline=None)
@pytest.mark.usefixtures("isa")
def test_products_are_those_of_float64(product: LinearKernel, act: str | None) -> None:
    x, weight, bias, residual = product.tensors()
    expected = F.linear(x.double(), weight.double(), bias.double())
    expected = (expected if act is None else ACTIVATIONS[act](expected)) + residual.double()
    magnitude = F.linear(x.double().abs(), weight.double().abs())
    assert_close(PackedLinear(weight, bias, activation=act)(x, residual), expected, magnitude)


@built
@given(products, st.booleans())
@settings(max_examples=40, deadline=None)
@pytest.mark.usefixtures("isa")
def test_gated_products_are_those_of_float64(product: LinearKernel, biased: bool) -> None:
    x, weight, bias, residual = product.tensors()
    weight = torch.cat((weight, weight.flip(0)))
    bias = torch.cat((bias, 1 - bias.flip(0))) if biased else torch.zeros(len(weight), dtype=product.dtype)
    gate, up = F.linear(x.double(), weight.double(), bias.double()).chunk(2, -1)
    of_gate, of_up = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs()).chunk(2, -1)
    packed = PackedLinear(weight, bias if biased else None, activation="silu", gated=True)
    assert_close(packed(x, residual), F.silu(gate) * up + residual.double(), (of_gate + 1) * (of_up + 1))


@built
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("isa")
def test_wide_inputs_are_multiplied_in_chunks(dtype: torch.dtype) -> None:
    """More inputs than a chunk has, more rows than are cached, and as few as are multiplied in another way."""
    x, weight, bias, residual = LinearKernel(101, 1030, 70, dtype, 0).tensors()
    packed = PackedLinear(weight, bias)
    magnitude = F.linear(x.double().abs(), weight.double().abs())
    expected = F.linear(x.double(), weight.double(), bias.double()) + residual.double()
    together = packed(x, residual)
    assert_close(together, expected, magnitude)
    for rows in (1, 16, 17, 23, 24, 33):
        assert torch.equal(packed(x[:rows], residual[:rows]), together[:rows])
    gated = PackedLinear(weight, bias, activation="silu", gated=True)
    gate, up = F.linear(x.double(), weight.double(), bias.double()).chunk(2, -1)
    of_gate, of_up = magnitude.chunk(2, -1)
    together = gated(x, residual[:, :35].contiguous())
    assert_close(together, F.silu(gate) * up + residual[:, :35].double(), (of_gate + 4) * (of_up + 4))
    assert torch.equal(gated(x[:1], residual[:1, :35].contiguous()), together[:1])


@built
def test_a_product_goes_where_it_is_told_to() -> None:
    x, weight, bias, residual = LinearKernel(3, 10, 7, torch.float32, 0).tensors()
    packed, out = PackedLinear(weight, bias), torch.empty(3, 7)
    assert packed(x, residual, out) is out
    assert torch.equal(out, packed(x, residual))
    for wrong in (torch.empty(2, 7), torch.empty(3, 7).double(), torch.empty(7, 3).T):
        with pytest.raises(ValueError, match="cannot take"):
            packed(x, residual, wrong)


@built
@given(products)
@settings(max_examples=20, deadline=None)
@pytest.mark.usefixtures("isa")
def test_packed_weight_rows_equal_the_original(product: LinearKernel) -> None:
    _, weight, _, _ = product.tensors()
    ids = torch.arange(len(weight)).flip(0)
    assert torch.equal(PackedLinear(weight).rows(ids), weight[ids])


@st.composite
def quantized_weights(draw: st.DrawFn, out_features: int, in_features: int) -> QuantizedWeight:
    bits = draw(st.sampled_from([4, 8]))
    group_size = draw(st.sampled_from([32, 64, 128] if bits == 4 else [16, 32, 64, 128, 0])) or in_features
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    values = torch.randint(0, 2**bits, (out_features, in_features), generator=generator, dtype=torch.uint8)
    scales = torch.rand(out_features, -(-in_features // group_size), generator=generator) + 0.1
    if group_size == in_features:
        return QuantizedWeight(8, group_size, values, scales, -128 * scales, draw(st.sampled_from([16, 8])))
    scales = (scales * 10.0 ** draw(st.integers(-7, 3))).half().float()
    if bits == 8:
        minimums = (scales * draw(st.sampled_from([0, 9])) * torch.randn(scales.shape, generator=generator)).half()
        return QuantizedWeight(8, group_size, values, scales, minimums.float() - 128 * scales)
    if draw(st.booleans()):
        return QuantizedWeight(4, group_size, values, scales, torch.zeros_like(scales), 16, is_coded=True)
    minimums = -8 * scales + draw(st.sampled_from([0, 1])) * scales * torch.randn(scales.shape, generator=generator)
    return QuantizedWeight(4, group_size, values, scales, minimums.half().float(), draw(st.sampled_from([16, 8])))


def largest_error_of_inputs(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """What rounding inputs to integers changes at most: to 16 bits for each row, to 8 for each group, or less beside
    weights that are not in groups."""
    if weight.input_bits == 16:
        return 2 * x.double().abs().amax(1, keepdim=True) * weight.dequantize().double().abs().sum(1) / 2**15
    padding = (0, -weight.shape[1] % weight.group_size)
    inputs = F.pad(x.double(), padding).unflatten(1, (-1, weight.group_size)).abs().amax(2)
    weights = F.pad(weight.dequantize().double(), padding).unflatten(1, (-1, weight.group_size)).abs().sum(2)
    return inputs @ weights.T / 254 * 1.01


@built
@given(products, st.data(), st.booleans())
@settings(max_examples=60, deadline=None)
@pytest.mark.usefixtures("isa")
def test_quantized_products_are_those_of_the_dequantized_weight(
    product: LinearKernel, data: st.DataObject, gated: bool
) -> None:
    x, _, bias, residual = product.tensors()
    out_features = product.out_features * (2 if gated else 1)
    bias = torch.cat((bias, 1 - bias)) if gated else bias
    weight = data.draw(quantized_weights(out_features, product.in_features))
    plain = weight.dequantize().double()
    expected = F.linear(x.double(), plain, bias.double())
    error_of_inputs = largest_error_of_inputs(x, weight) * 2**20
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
        first, second = error_of_inputs.chunk(2, -1)
        error_of_inputs = first * (up.abs() + 1) + second * (gate.abs() + 1)
        packed = PackedLinear(weight, bias, dtype=product.dtype, activation="silu", gated=True)
    else:
        packed = PackedLinear(weight, bias, dtype=product.dtype)
    assert_close(packed(x, residual), expected + residual.double(), error_of_inputs)


@built
@given(products, st.data())
@settings(max_examples=20, deadline=None)
@pytest.mark.usefixtures("isa")
def test_quantized_weight_rows_are_dequantized(product: LinearKernel, data: st.DataObject) -> None:
    weight = data.draw(quantized_weights(product.out_features, product.in_features))
    ids = torch.arange(product.out_features).flip(0)
    rows = PackedLinear(weight, dtype=product.dtype).rows(ids)
    expected = weight.dequantize()[ids]
    torch.testing.assert_close(rows.float(), expected, atol=1e-4, rtol=1e-5 if product.dtype == torch.float32 else 1e-2)


@built
@given(products, st.data(), st.booleans())
@settings(max_examples=40, deadline=None)
@pytest.mark.usefixtures("isa")
def test_row_results_do_not_depend_on_the_batch(product: LinearKernel, data: st.DataObject, quantized: bool) -> None:
    x, weight, bias, residual = product.tensors()
    if quantized:
        drawn = data.draw(quantized_weights(product.out_features, product.in_features))
        packed = PackedLinear(drawn, bias, dtype=product.dtype)
    else:
        packed = PackedLinear(weight, bias)
    together = packed(x, residual)
    for row in range(product.rows):
        alone = packed(x[row : row + 1], residual[row : row + 1])
        assert torch.equal(alone[0], together[row]), row


@built
@pytest.mark.parametrize("input_bits", [16, 8])
@pytest.mark.parametrize(("bits", "group_size"), [(8, 1100), (8, 32), (8, 16), (4, 32), (4, 64), (4, 128), (4, 320)])
@pytest.mark.usefixtures("isa")
def test_quantized_rows_equal_those_of_many(bits: int, group_size: int, input_bits: int) -> None:
    """More inputs than a chunk has, and about as few rows as are multiplied in another way."""
    x, _, bias, residual = LinearKernel(270, 1100, 70, torch.bfloat16, 0).tensors()
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 2**bits, (70, 1100), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(70, -(-1100 // group_size), generator=generator) / 100 + 0.001).half().float()
    for minimums in (-(2 ** (bits - 1)) * scales, (-3 * scales).half().float()):
        if group_size == 1100 and not torch.equal(minimums, -128 * scales):
            continue
        weight = QuantizedWeight(bits, group_size, values, scales, minimums, input_bits)
        packed = PackedLinear(weight, bias, dtype=x.dtype)
        together = packed(x, residual)
        for rows in (1, 15, 16, 17, 33):
            assert torch.equal(packed(x[-rows:], residual[-rows:]), together[-rows:]), rows


@built
@pytest.mark.usefixtures("isa")
def test_symmetric_4_bit_groups_store_no_minimums() -> None:
    values, scales = torch.full((64, 256), 3, dtype=torch.uint8), torch.ones(64, 8)
    symmetric = QuantizedWeight(4, 32, values, scales, -8 * scales)
    shifted = QuantizedWeight(4, 32, values, scales, -7 * scales)
    for weight, each in ((symmetric, 18), (shifted, 20)):
        assert PackedLinear(weight).num_bytes == weight.num_bytes == 64 * 8 * each


@built
@pytest.mark.parametrize("rows", [1, 3, 12, 40])
@pytest.mark.parametrize(
    ("bits", "group_size", "value", "input_bits"),
    [
        *((8, group_size, value, bits) for group_size in (1664, 128) for value in (0, 255) for bits in (16, 8)),
        *((4, 128, value, bits) for value in (0, 15) for bits in (16, 8)),
    ],
)
@pytest.mark.usefixtures("isa")
def test_the_largest_products_add_up(rows: int, bits: int, group_size: int, value: int, input_bits: int) -> None:
    in_features = 1664
    values = torch.full((33, in_features), value, dtype=torch.uint8)
    scales = torch.ones(33, in_features // group_size)
    minimum = -128 if bits == 8 else -8 if value == 0 else 1
    weight = QuantizedWeight(bits, group_size, values, scales, scales * minimum, input_bits)
    x = torch.ones(rows, in_features) * torch.tensor([1.0, -1.0]).repeat(rows)[:rows, None]
    expected = x @ weight.dequantize().T
    torch.testing.assert_close(PackedLinear(weight)(x), expected, rtol=1e-5, atol=0)


@built
@pytest.mark.parametrize("group_size", [32, 128, 320])
@pytest.mark.usefixtures("isa")
def test_outliers_do_not_coarsen_other_8_bit_groups(group_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (40, 320), generator=generator, dtype=torch.uint8)
    values[:, :128] = 128
    scales = torch.full((40, -(-320 // group_size)), 0.01)
    weight = QuantizedWeight(8, group_size, values, scales, -128 * scales, 8)
    x = torch.randn(7, 320, generator=generator)
    expected = x @ weight.dequantize().T
    x[:, 5] = 1000
    # With one scale for all of a row, all other inputs would become zero.
    assert (PackedLinear(weight)(x) - expected).norm() < 0.02 * expected.norm()


@built
@pytest.mark.parametrize("group_size", [16, 32, 128, 320])
def test_input_bits_follow_the_8_bit_weight(isa: str, group_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (40, 320), generator=generator, dtype=torch.uint8)
    scales = torch.full((40, -(-320 // group_size)), 2.0**-7)
    x = torch.randn(7, 320, generator=generator)
    errors = {}
    for input_bits in (8, 16):
        weight = QuantizedWeight(8, group_size, values, scales, -128 * scales, input_bits)
        expected = x.double() @ weight.dequantize().double().T
        errors[input_bits] = float((PackedLinear(weight)(x) - expected).norm() / expected.norm())
        if input_bits == 8 and isa in DOTS:
            size = min(group_size, 128)
            groups = F.pad(x, (0, -320 % size)).unflatten(1, (-1, size))
            steps = groups.abs().amax(2, keepdim=True).clamp(min=1e-9) / 127
            rounded = ((groups / steps).round() * steps).flatten(1)[:, :320] @ weight.dequantize().T
            torch.testing.assert_close(PackedLinear(weight)(x), rounded, atol=1e-3, rtol=1e-5)
    assert errors[16] < 1e-4
    assert errors[8] > 1e-3 if isa in DOTS else errors[8] == errors[16]


@built
@pytest.mark.parametrize(("bits", "input_bits"), [(4, 8), (4, 16), (8, 16), (8, 8)])
@pytest.mark.usefixtures("isa")
def test_quantized_products_of_no_numbers_and_of_zeros(bits: int, input_bits: int) -> None:
    values = torch.full((3, 8), {4: 10, 8: 130}[bits], dtype=torch.uint8)
    minimums = torch.full((3, 1), {4: -8.0, 8: -128.0}[bits])
    packed = PackedLinear(QuantizedWeight(bits, 8, values, torch.ones(3, 1), minimums, input_bits))
    x = torch.zeros(3, 8)
    x[1, 2], x[2, 3] = float("nan"), float("inf")
    assert torch.equal(packed(x)[0], torch.zeros(3))
    assert not packed(x)[1:].isfinite().any()


@built
@given(
    st.integers(1, 20),
    st.integers(1, 130),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.floats(0, 50),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.usefixtures("isa")
def test_norms_are_those_of_float64(rows: int, size: int, dtype: torch.dtype, shifts: bool, mean: float) -> None:
    generator = torch.Generator().manual_seed(rows * size)
    x = (torch.randn(rows, size, generator=generator) + mean).to(dtype)
    weight, bias = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    if shifts:
        expected = F.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-5)
    else:
        expected = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    actual = NativeNorm(weight, bias if shifts else None, 1e-5)(x)
    scale = expected.abs()
    if shifts:
        # Subtracting a mean that is large beside the deviation loses what the input's own precision cannot hold.
        variance, of_row = torch.var_mean(x.double(), -1, correction=0, keepdim=True)
        scale = scale + 20 + mean**2 + of_row.abs() / (variance + 1e-5).sqrt()
    assert_close(actual, expected, scale)


@built
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "swish"])
def test_activations_hold_for_every_size_of_number(name: str) -> None:
    values = torch.cat((torch.linspace(-100, 100, 4001), torch.linspace(-1e-3, 1e-3, 99), torch.tensor([-1e30, 1e30])))
    actual = PackedLinear(torch.eye(1).expand(1, 1), activation=name)(values[:, None])[:, 0]
    expected = ACTIVATIONS[name](values.double())
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=3e-6)


@built
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    weight = torch.eye(4, dtype=dtype)
    x = torch.tensor([[1.0, float("nan"), float("inf"), -float("inf")]], dtype=dtype)
    assert PackedLinear(weight)(x).isnan().all(), "0 times infinity is not a number"
    assert NativeNorm(torch.ones(4, dtype=dtype), None, 1e-5)(x)[0, 1].isnan()
    assert PackedLinear(weight, activation="silu")(x[:, :2].repeat(1, 2)).isnan().all()


@built
@pytest.mark.parametrize("isa", supported_isas())
def test_each_instruction_set_can_be_chosen(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kernels(isa, torch.float32) == isa
    monkeypatch.setenv(choice.VARIABLE, isa)
    assert choose_kernels("auto", torch.bfloat16) == isa
    choose_kernels(supported_isas()[0], torch.float32)


def test_kernels_that_were_not_compiled_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = SimpleNamespace(
        supported_isas=lambda: ("avx2", "portable"),
        runnable_isas=lambda: ("avx512", "avx2", "portable"),
        select_isa=lambda isa: None,
    )
    monkeypatch.setattr(extension, "native", kernels)
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=r"avx512: not compiled; in the clone, .* type: VLMSERVE_ISAS=here "):
        choose_kernels("avx512", torch.float32)
    with pytest.raises(ConfigurationError, match="not available on this machine"):
        choose_kernels("amx", torch.float32)
    assert choose_kernels("auto", torch.float32) == "avx2"
    assert f"avx512, this processor's best, are not compiled; {extension.COMPILE_HERE}" in caplog.text


def test_the_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not choose_kernels("torch", torch.float32)
    monkeypatch.setenv(choice.VARIABLE, "torch")
    assert not choose_kernels("auto", torch.float32)


def test_missing_extension_falls_back_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(extension, "native", None)
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    with caplog.at_level(logging.INFO):
        assert not choose_kernels("auto", torch.float32)
    assert [record.message for record in caplog.records] == [
        "kernels: torch (native ones were not built, or for another version)"
    ]
    with pytest.raises(ConfigurationError, match="not built"):
        choose_kernels("native", torch.float32)


@built
@pytest.mark.parametrize("faster", [True, False])
def test_unmeasured_kernels_run_unless_slower_than_torch(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def faster_than_torch(isa: str, dtype: torch.dtype) -> bool:
        tried.append(isa)
        return faster

    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(choice, "MEASURED", frozenset())
    monkeypatch.setattr(choice, "is_as_fast_as_torch", faster_than_torch)
    assert choose_kernels("auto", torch.float32) == (supported_isas()[0] if faster else None)
    assert tried == list(supported_isas()[:1] if faster else supported_isas())
    assert choose_kernels("native", torch.float32)
    assert len(tried) in (1, len(supported_isas())), "what is asked for is not measured"
    choose_kernels(supported_isas()[0], torch.float32)


def test_kernels_that_this_machine_lacks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="choose one of auto, torch"):
        choose_kernels("sse9", torch.float32)


@built
def test_wrong_shapes_are_refused() -> None:
    packed = PackedLinear(torch.ones(3, 4))
    with pytest.raises(ValueError, match="does not fit"):
        packed(torch.ones(2, 5))
    with pytest.raises(ValueError, match="does not fit"):
        packed(torch.ones(2, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="residual"):
        packed(torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match="cannot be packed"):
        PackedLinear(torch.ones(3, 5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="does not fit"):
        NativeNorm(torch.ones(4), None, 1e-5)(torch.ones(2, 5))
