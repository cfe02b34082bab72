"""Linear layers, plain and packed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.kernels.extension import supported_isas
from vlmserve.layers import linear as layers
from vlmserve.layers.linear import GatedLinear, Linear, MergedLinear, TiedEmbedding, can_reorder

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


KERNELS = [
    pytest.param(
        True,
        marks=pytest.mark.skipif(not supported_isas(), reason="the native kernels were not built: no C++ compiler"),
        id="native",
    ),
    pytest.param(False, id="torch"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOLERANCES = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, torch.bfloat16: {"atol": 0.2, "rtol": 1e-2}}


@pytest.mark.parametrize("native", KERNELS)
@DTYPES
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("act", [None, "silu", "gelu", "gelu_new", "quick_gelu", "relu"])
@pytest.mark.parametrize(
    "kind", ["one row", "rows", "a batch", "a slice of a wider tensor", "a batch without its first rows", "no rows"]
)
def test_a_packed_layer_gives_what_the_plain_one_gave(
    kind: str, act: str | None, bias: bool, dtype: torch.dtype, native: bool
) -> None:
    if not native and not can_reorder(dtype, CPU):
        pytest.skip("this torch or CPU does not rearrange weights")
    linear = Linear(48, 33, bias=bias, dtype=dtype, device=CPU, act=act)
    fill(linear)
    x = inputs(kind, 48, dtype)
    residual = torch.randn(*x.shape[:-1], 33, dtype=dtype)
    plain, added = linear(x), linear(x, residual)
    linear.pack(native=native)
    torch.testing.assert_close(linear(x), plain, **TOLERANCES[dtype])
    torch.testing.assert_close(linear(x, residual), added, **TOLERANCES[dtype])
    assert "weight" not in dict(linear.named_parameters()), "the plain weight would take its memory twice"


@pytest.mark.parametrize("native", KERNELS)
@DTYPES
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_a_packed_gated_layer_gives_what_the_plain_one_gave(bias: bool, dtype: torch.dtype, native: bool) -> None:
    gated = GatedLinear(48, {"gate_proj": 21, "up_proj": 21}, "silu", bias=bias, dtype=dtype, device=CPU)
    fill(gated)
    x = torch.randn(5, 48, dtype=dtype)
    expected = F.silu(F.linear(x, gated.weight[:21], None if gated.bias is None else gated.bias[:21])) * F.linear(
        x, gated.weight[21:], None if gated.bias is None else gated.bias[21:]
    )
    gated.pack(native=native)
    torch.testing.assert_close(gated(x), expected, atol=1e-3 if dtype == torch.float32 else 0.5, rtol=2e-2)


@pytest.mark.parametrize("native", KERNELS)
@DTYPES
def test_a_packed_table_gives_its_rows_and_logits(dtype: torch.dtype, native: bool) -> None:
    table = TiedEmbedding(70, 24, dtype=dtype, device=CPU)
    torch.manual_seed(0)
    nn.init.normal_(table.weight)
    weight = table.weight.data.clone()
    ids = torch.tensor([0, 69, 33, 33, 15, 16, 31, 32])
    hidden = torch.randn(5, 24, dtype=dtype)
    table.pack(native=native)
    assert torch.equal(table(ids), weight[ids])
    logits = table.logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ weight.float().T, **TOLERANCES[dtype])
    assert native == ("weight" not in dict(table.named_parameters()))


@pytest.mark.skipif(not supported_isas(), reason="the native kernels were not built: no C++ compiler")
def test_an_odd_number_of_bfloat16_inputs_stays_plain() -> None:
    linear = Linear(47, 33, bias=False, dtype=torch.bfloat16, device=CPU)
    fill(linear)
    x = torch.randn(3, 47, dtype=torch.bfloat16)
    expected = F.linear(x, linear.weight)
    linear.pack(native=True)
    torch.testing.assert_close(linear(x), expected, **TOLERANCES[torch.bfloat16])


def test_merged_projections_equal_single_ones() -> None:
    merged = MergedLinear(12, {"q_proj": 8, "k_proj": 4, "v_proj": 4}, bias=True, dtype=torch.float32, device=CPU)
    fill(merged)
    slots = dict(merged.slots())
    assert list(slots) == [f"{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    x = torch.randn(3, 12)
    single = [F.linear(x, slots[f"{part}_proj.weight"], slots[f"{part}_proj.bias"]) for part in "qkv"]
    torch.testing.assert_close(merged(x), torch.cat(single, -1))


def test_only_what_onednn_computes_is_packed() -> None:
    assert not can_reorder(torch.float64, CPU)
    assert not can_reorder(torch.float32, torch.device("meta"))


@pytest.mark.parametrize("rows", [1, layers.FEW_ROWS, layers.FEW_ROWS + 1, 100])
def test_bfloat16_products_are_the_same_with_and_without_instructions_for_them(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    product = torch.nn.functional.linear
    monkeypatch.setattr(layers, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(layers.F, "linear", lambda x, *rest: (computed.append(x.dtype), product(x, *rest))[1])
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, 48, generator=generator), torch.randn(20, 48, generator=generator)
    bias = torch.randn(20, generator=generator)
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    output = layers.product(x, weight, bias)
    assert computed == [torch.bfloat16 if rows <= layers.FEW_ROWS else torch.float32]
    assert output.dtype == torch.bfloat16
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(output.double(), exact, rtol=0.02, atol=0.05)
