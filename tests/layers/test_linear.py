"""Linear layers, plain and as devices store them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.devices.cpu import CpuDevice, NativeCpuDevice
from vlmserve.devices.cuda import CudaDevice
from vlmserve.devices.device import Device
from vlmserve.kernels.adapters import AdapterRows, Change, LowRank
from vlmserve.kernels.extension import supported_isas
from vlmserve.kernels.operations import Epilogue, LinearKernel
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.layers.cut import Cut, Share
from vlmserve.layers.linear import GatedLinear, Linear, MergedLinear, TiedEmbedding
from vlmserve.quant.methods.rtn import round_to_nearest

CPU = torch.device("cpu")


def fill(linear: Linear) -> None:
    torch.manual_seed(0)
    for parameter in linear.parameters():
        nn.init.normal_(parameter)


def inputs(kind: str, features: int, dtype: torch.dtype) -> Tensor:
    wide = torch.randn(6, 5, 2 * features, dtype=dtype)
    shapes = {
        "one row": wide[0, :1, :features].contiguous(),
        "rows": wide[0, :, :features].contiguous(),
        "a batch": wide[..., :features].contiguous(),
        "a slice of a wider tensor": wide[0, :, features:],
        "a batch without its first rows": wide[:, 1:, :features],
        "no rows": wide[0, :0, :features],
    }
    return shapes[kind]


DEVICES = [Device(CPU), CpuDevice(CPU), *(NativeCpuDevice(CPU, isa) for isa in supported_isas()[:1])]
every_device = pytest.mark.parametrize("device", DEVICES, ids=lambda device: type(device).__name__)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOLERANCES = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, torch.bfloat16: {"atol": 0.2, "rtol": 1e-2}}


KINDS = ["one row", "rows", "a batch", "a slice of a wider tensor", "a batch without its first rows", "no rows"]
ACTIVATIONS = [None, "silu", "gelu", "gelu_new", "quick_gelu", "relu"]
SHAPES = list(
    zip(itertools.product(KINDS, ACTIVATIONS), itertools.cycle([True, False, False, True, True]), strict=False)
)
"""Each kind of rows with each activation, and a bias with most of either."""


@every_device
@DTYPES
def test_prepared_layer_equals_plain_layer(dtype: torch.dtype, device: Device) -> None:
    for (kind, act), bias in SHAPES:
        check_prepared(kind, act, bias, dtype, device)


def check_prepared(kind: str, act: str | None, bias: bool, dtype: torch.dtype, device: Device) -> None:
    linear = Linear(48, 33, bias=bias, dtype=dtype, device=CPU, act=act)
    fill(linear)
    x = inputs(kind, 48, dtype)
    residual = torch.randn(*x.shape[:-1], 33, dtype=dtype)
    plain, added = linear(x), linear(x, residual)
    linear.arrange(device)
    torch.testing.assert_close(linear(x), plain, **TOLERANCES[dtype])
    torch.testing.assert_close(linear(x, residual), added, **TOLERANCES[dtype])
    assert "weight" not in dict(linear.named_parameters()), "the plain weight would take its memory twice"


@every_device
@DTYPES
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_prepared_gated_layer_equals_plain_layer(bias: bool, dtype: torch.dtype, device: Device) -> None:
    gated = GatedLinear(48, {"gate_proj": 21, "up_proj": 21}, "silu", bias=bias, dtype=dtype, device=CPU)
    fill(gated)
    x = torch.randn(5, 48, dtype=dtype)
    expected = F.silu(F.linear(x, gated.weight[:21], None if gated.bias is None else gated.bias[:21])) * F.linear(
        x, gated.weight[21:], None if gated.bias is None else gated.bias[21:]
    )
    gated.arrange(device)
    torch.testing.assert_close(gated(x), expected, atol=1e-3 if dtype == torch.float32 else 0.5, rtol=2e-2)


@every_device
@DTYPES
def test_an_arranged_table_gives_its_rows_and_logits(dtype: torch.dtype, device: Device) -> None:
    table = TiedEmbedding(70, 24, dtype=dtype, device=CPU)
    torch.manual_seed(0)
    nn.init.normal_(table.weight)
    weight = table.weight.data.clone()
    ids = torch.tensor([0, 69, 33, 33, 15, 16, 31, 32])
    hidden = torch.randn(5, 24, dtype=dtype)
    table.arrange(device)
    assert torch.equal(table(ids), weight[ids])
    logits = table.logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ weight.float().T, **TOLERANCES[dtype])
    assert "weight" not in dict(table.named_parameters()), "the plain weight would take its memory twice"


@every_device
def test_odd_bfloat16_input_sizes_work(device: Device) -> None:
    linear = Linear(47, 33, bias=False, dtype=torch.bfloat16, device=CPU)
    fill(linear)
    x = torch.randn(3, 47, dtype=torch.bfloat16)
    expected = F.linear(x, linear.weight)
    linear.arrange(device)
    torch.testing.assert_close(linear(x), expected, **TOLERANCES[torch.bfloat16])


def test_merged_projections_equal_single_ones() -> None:
    merged = MergedLinear(12, {"q_proj": 8, "k_proj": 4, "v_proj": 4}, bias=True, dtype=torch.float32, device=CPU)
    fill(merged)
    slots = dict(merged.slots())
    assert list(slots) == [f"{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    x = torch.randn(3, 12)
    single = [F.linear(x, slots[f"{part}_proj.weight"], slots[f"{part}_proj.bias"]) for part in "qkv"]
    torch.testing.assert_close(merged(x), torch.cat(single, -1))


class PaddingDevice(Device):
    """A CPU that has products of as many inputs as a GPU has. shapes: of their weights."""

    product_inputs = CudaDevice.product_inputs

    def __init__(self) -> None:
        super().__init__(CPU)
        self.shapes: list[tuple[int, ...]] = []

    def linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype
    ) -> LinearKernel:
        """See `Operations.linear`."""
        self.shapes.append(tuple(weight.shape))
        return super().linear(weight, bias, epilogue, dtype)


@pytest.mark.parametrize(
    ("inputs", "dtype", "padded"),
    [
        (3420, torch.bfloat16, 3456),
        (588, torch.bfloat16, 640),
        (588, torch.float32, 588),
        (4304, torch.float16, 4304),
        (4096, torch.bfloat16, 4096),
    ],
)
def test_gpu_result_rows_are_16_byte_aligned(inputs: int, dtype: torch.dtype, padded: int) -> None:
    assert PaddingDevice().product_inputs(inputs, dtype) == padded
    assert Device(CPU).product_inputs(inputs, dtype) == inputs


def gated_mlp(*, bias: bool = True) -> tuple[GatedLinear, Linear]:
    """From 32 features to 18 and back."""
    first = GatedLinear(32, {"gate_proj": 18, "up_proj": 18}, "silu", bias=bias, dtype=torch.float32, device=CPU)
    second = Linear(18, 32, bias=bias, dtype=torch.float32, device=CPU)
    fill(first)
    fill(second)
    return first, second


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_padding_between_two_matmuls_happens_once(bias: bool) -> None:
    first, second = gated_mlp(bias=bias)
    x, residual = torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    expected = second(first(x), residual)
    device = PaddingDevice()
    first.widen_for(second, device)
    for layer in (first, second):
        layer.arrange(device)
    assert device.shapes == [(128, 32), (32, 64)]
    assert (first.out_features, second.in_features) == (36, 18), "adapters are made for these"
    inner = first(x)
    assert inner.shape == (2, 3, 64)
    assert not inner[..., 18:].any()
    torch.testing.assert_close(second(inner, residual), expected)


def test_a_product_pads_inputs_that_no_product_made() -> None:
    linear = Linear(18, 33, bias=True, dtype=torch.float32, device=CPU, act="gelu")
    fill(linear)
    x = torch.randn(5, 18)
    expected = linear(x)
    device = PaddingDevice()
    linear.arrange(device)
    assert device.shapes == [(33, 64)]
    torch.testing.assert_close(linear(x), expected)


def test_nothing_is_padded_beside_weights_of_few_bits() -> None:
    for quantized in range(2):
        layers = gated_mlp()
        x = torch.randn(3, 32)
        layer = layers[quantized]
        layer.quantize(round_to_nearest(layer.weight.data, bits=8, group_size=layer.in_features, symmetric=True))
        expected = layers[1](layers[0](x))
        device = PaddingDevice()
        layers[0].widen_for(layers[1], device)
        for one in layers:
            one.arrange(device)
        assert device.shapes == [(36, 32), (32, 18 if quantized else 64)]
        torch.testing.assert_close(layers[1](layers[0](x)), expected)


def test_adapters_change_padded_products_as_others() -> None:
    random = torch.Generator().manual_seed(2)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    gates, ups, all_of_them = (
        LowRank(some(3, 32), some(size, 3), start) for size, start in ((18, 0), (18, 18), (36, 0))
    )
    of_first = [
        Change((gates, ups)),
        Change((ups,), factor=some(36), shift=some(36)),
        Change((all_of_them,)),
        Change(weight=some(36, 32), bias=some(36)),
    ]
    of_second = [
        Change((LowRank(some(3, 18), some(32, 3)),)),
        Change((LowRank(some(3, 18), some(20, 3), 7),), factor=some(32)),
        Change(outputs=(torch.tensor([2, 30]), some(2, 18))),
        Change(weight=some(32, 18)),
    ]
    x, residual, results = some(5, 32), some(5, 32), []
    for device in (Device(CPU), PaddingDevice()):
        layers = gated_mlp()
        layers[0].widen_for(layers[1], device)
        rows = AdapterRows(4)
        for layer, changes in zip(layers, (of_first, of_second), strict=True):
            layer.arrange(device)
            layer.adapt(rows)
            for slot, change in enumerate(changes):
                layer.set_adapter(slot, layer.prepare(change))
        rows.set([0, 1, -1, 2, 3], [1] * 5)
        results.append(layers[1](layers[0](x), residual))
    torch.testing.assert_close(results[1], results[0])


def sorted_weight(out_features: int, seed: int = 0) -> tuple[QuantizedWeight, Tensor]:
    """A weight of 4 bits for 96 inputs whose columns are in another order, and what it stands for in float64."""
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(96, generator=random)
    columns = torch.randn(out_features, 96, generator=random)
    weight = round_to_nearest(columns, bits=4, group_size=32, symmetric=False)
    plain = torch.empty(out_features, 96, dtype=torch.float64)
    for column, place in enumerate(order.tolist()):
        scales, minimums = weight.scales[:, column // 32].double(), weight.minimums[:, column // 32].double()
        plain[:, place] = scales * weight.values[:, column].double() + minimums
    return dataclasses.replace(weight, order=order), plain


@every_device
def test_inputs_and_adapters_follow_column_order(device: Device) -> None:
    random = torch.Generator().manual_seed(1)
    weight, plain = sorted_weight(40)
    linear = Linear(96, 40, bias=True, dtype=torch.float32, device=CPU)
    fill(linear)
    assert linear.bias is not None
    bias = linear.bias.data.double()
    linear.quantize(weight)
    linear.arrange(device)
    rows = AdapterRows(2)
    linear.adapt(rows)
    down, up = torch.randn(6, 96, generator=random), torch.randn(40, 6, generator=random)
    other, factor = torch.randn(40, 96, generator=random), torch.rand(40, generator=random) + 0.5
    linear.set_adapter(0, linear.prepare(Change((LowRank(down, up),), factor=factor)))
    linear.set_adapter(1, linear.prepare(Change(weight=other)))
    rows.set([-1, 0, 1, 0, -1], [1] * 5)
    x = torch.randn(5, 96, generator=random)
    adapted = factor[:, None].double() * (plain + (up.double() @ down.double()))
    weights = [plain, adapted, other.double(), adapted, plain]
    expected = torch.stack([one @ row.double() for one, row in zip(weights, x, strict=True)])
    expected += torch.stack([torch.zeros(40) if row == 2 else bias for row in range(5)])
    result = linear(x).double()
    # The native kernels round inputs to 8 bits.
    assert ((result - expected).norm(dim=1) < 0.02 * expected.norm(dim=1)).all()


def test_reordered_weights_are_sharded_and_joined() -> None:
    weight, plain = sorted_weight(40)
    torch.testing.assert_close(weight.dequantize(), plain.float())
    rows = Cut(40, ((8, 16), (32, 40))).of(weight)
    assert isinstance(rows, QuantizedWeight)
    torch.testing.assert_close(rows.dequantize(), plain.float()[[*range(8, 16), *range(32, 40)]])
    columns = Cut(40, ((0, 40),), Share(32, 64, 96)).of(weight)
    assert isinstance(columns, Tensor), "groups have inputs in both parts"
    torch.testing.assert_close(columns, plain.float()[:, 32:64])
    torch.testing.assert_close(QuantizedWeight.join([weight, rows]).dequantize()[:40], plain.float())
    for other in (sorted_weight(40, seed=1)[0], dataclasses.replace(weight, order=None)):
        with pytest.raises(ValueError, match="several kinds"):
            QuantizedWeight.join([weight, other])
