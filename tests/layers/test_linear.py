"""Linear layers, plain and as devices store them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.devices.cpu import CpuDevice, NativeCpuDevice
from vlmserve.devices.device import Device
from vlmserve.devices.torch_device import TorchDevice
from vlmserve.kernels.extension import supported_isas
from vlmserve.layers.linear import GatedLinear, Linear, MergedLinear, TiedEmbedding

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


DEVICES = [TorchDevice(CPU), CpuDevice(CPU), *(NativeCpuDevice(CPU, isa) for isa in supported_isas()[:1])]
every_device = pytest.mark.parametrize("device", DEVICES, ids=lambda device: type(device).__name__)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOLERANCES = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, torch.bfloat16: {"atol": 0.2, "rtol": 1e-2}}


@every_device
@DTYPES
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("act", [None, "silu", "gelu", "gelu_new", "quick_gelu", "relu"])
@pytest.mark.parametrize(
    "kind", ["one row", "rows", "a batch", "a slice of a wider tensor", "a batch without its first rows", "no rows"]
)
def test_an_arranged_layer_gives_what_the_plain_one_gave(
    kind: str, act: str | None, bias: bool, dtype: torch.dtype, device: Device
) -> None:
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
def test_an_arranged_gated_layer_gives_what_the_plain_one_gave(bias: bool, dtype: torch.dtype, device: Device) -> None:
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
def test_an_odd_number_of_bfloat16_inputs_is_multiplied_as_well(device: Device) -> None:
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
