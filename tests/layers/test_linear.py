"""Linear layers, plain and packed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.layers.linear import Linear, MergedLinear, can_pack

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "kind", ["one row", "rows", "a batch", "a slice of a wider tensor", "a batch without its first rows", "no rows"]
)
def test_a_packed_layer_gives_what_the_plain_one_gave(kind: str, bias: bool, dtype: torch.dtype) -> None:
    if not can_pack(dtype, CPU):
        pytest.skip("this torch or CPU does not pack")
    linear = Linear(48, 33, bias=bias, dtype=dtype, device=CPU)
    fill(linear)
    x = inputs(kind, 48, dtype)
    expected = F.linear(x, linear.weight, linear.bias)
    linear.pack()
    torch.testing.assert_close(linear(x), expected, atol=1e-4 if dtype == torch.float32 else 0.2, rtol=1e-2)
    assert "weight" not in dict(linear.named_parameters()), "the plain weight would take its memory twice"


def test_merged_projections_equal_single_ones() -> None:
    merged = MergedLinear(12, {"q_proj": 8, "k_proj": 4, "v_proj": 4}, bias=True, dtype=torch.float32, device=CPU)
    fill(merged)
    slots = dict(merged.slots())
    assert list(slots) == [f"{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    x = torch.randn(3, 12)
    single = [F.linear(x, slots[f"{part}_proj.weight"], slots[f"{part}_proj.bias"]) for part in "qkv"]
    torch.testing.assert_close(merged(x), torch.cat(single, -1))


def test_only_what_onednn_computes_is_packed() -> None:
    assert not can_pack(torch.float64, CPU)
    assert not can_pack(torch.float32, torch.device("meta"))
