"""The residual stream against plain sums and norms in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vlmserve.devices.device import Device
from vlmserve.kernels.operations import DeferredNorm, LinearKernel, NormedRows
from vlmserve.layers.layer import arrange_layers
from vlmserve.layers.linear import Linear
from vlmserve.layers.norm import LayerNorm, Normalization, RMSNorm
from vlmserve.layers.residual import ResidualStream, Unfinished

CPU, FLOAT = torch.device("cpu"), torch.float64
SIZE, INNER, ROWS = 6, 4, 5


class FusedNorm:
    """A `SummingNorm`. of_sums: how many sums it normed."""

    eps = 1e-6

    def __init__(self, weight: Tensor, offset: float) -> None:
        self.weight = weight + offset
        self.of_sums = 0

    def __call__(self, x: Tensor) -> Tensor:
        return torch.rms_norm(x, (SIZE,), self.weight, self.eps)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x) + residual

    def of_sum(self, x: Tensor, residual: Tensor, first: Any = None) -> NormedRows:
        self.of_sums += 1
        rows = residual + (x if first is None else first(x))
        return NormedRows(rows, self(rows))


@dataclass
class DeferringLinear:
    """A `DeferringLinearKernel`. completed: how many norms were left to it."""

    product: LinearKernel
    completed: int = 0

    @property
    def num_bytes(self) -> int:
        return self.product.num_bytes

    def __call__(self, *arguments: Any) -> Tensor:
        return self.product(*arguments)

    def completes(self, rows: int) -> bool:
        return rows < ROWS

    def complete(self, x: DeferredNorm) -> Tensor:
        self.completed += 1
        return self.product(x.normed)

    def deferring(self, x: Tensor, residual: Tensor, norm: Any) -> DeferredNorm | None:
        rows = self.product(x, residual)
        return DeferredNorm(rows, rows * norm.weight, rows.square().sum(1, keepdim=True), norm, norm.eps)


class FusingDevice(Device):
    """Computes norms with sums, and leaves norms to linear layers of fewer than `ROWS` rows."""

    def linear(self, *arguments: Any) -> LinearKernel:
        return DeferringLinear(super().linear(*arguments))

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0) -> Any:
        return FusedNorm(weight, offset) if bias is None else None


def linear(inputs: int, outputs: int) -> Linear:
    layer = Linear(inputs, outputs, bias=True, dtype=FLOAT, device=CPU)
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


def norm(kind: str | None) -> Normalization | None:
    if kind is None:
        return None
    made = LayerNorm if kind == "layer" else RMSNorm
    layer = made(SIZE, 1e-6, dtype=FLOAT, device=CPU)
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


NORMS = st.sampled_from([None, "layer", "rms"])


@st.composite
def blocks(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Blocks in order: norms of inputs and outputs, whether a block reads what the block before it read (parallel)."""
    kinds = st.fixed_dictionaries(
        {"input": NORMS, "output": NORMS, "parallel": st.booleans(), "shared": st.booleans(),
         "factor": st.sampled_from([None, 0.22, "vector"]), "narrow": st.sampled_from([None, None, [4, 0], []])}
    )  # fmt: skip
    return draw(st.lists(kinds, min_size=1, max_size=4))


@given(blocks(), st.booleans(), st.sampled_from([Device, FusingDevice, None]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_streams_equal_plain_sums(layers: list[dict[str, Any]], post: bool, device: Any, seed: int) -> None:
    """device: None: layers that are not arranged."""
    torch.manual_seed(seed)
    rows = torch.randn(ROWS, SIZE, dtype=FLOAT)
    stream, expected = ResidualStream(rows.clone(), post_norm=post), rows
    x: Any = None
    read = expected
    narrowed = False
    for layer in layers:
        before, after = norm(layer["input"]), norm(layer["output"])
        first, last = linear(SIZE, INNER), linear(INNER, SIZE)
        factor = torch.randn(SIZE, dtype=FLOAT) if layer["factor"] == "vector" else layer["factor"]
        after = after if factor is None else None
        by_torch = before, after, first, last
        plain = [one if one is None else one.forward for one in by_torch]
        if x is None or not layer["parallel"] or isinstance(x, DeferredNorm):
            read = expected if plain[0] is None else plain[0](expected)
        output = plain[3](plain[2](read))  # type: ignore[misc]
        if factor is not None:
            expected = expected + factor * output
        elif post and plain[1] is not None:
            expected = plain[1](expected + output)
        else:
            expected = expected + (output if plain[1] is None else plain[1](output))
        for one in by_torch:
            if device is not None and one is not None:
                arrange_layers(one, device(CPU))
        if x is None or not layer["parallel"] or isinstance(x, DeferredNorm):
            x = stream.normed(before, None if layer["shared"] else first)
        stream.add(Unfinished(last, first(x)), after, factor)
        if layer["narrow"] is not None and not narrowed:
            wanted, narrowed = torch.tensor(layer["narrow"], dtype=torch.int64), True
            stream.narrow(wanted)
            expected, x = expected[wanted], None
    torch.testing.assert_close(stream.rows, expected)


def test_norms_come_with_sums_or_are_deferred() -> None:
    torch.manual_seed(0)
    device = FusingDevice(CPU)
    reader, last, following, output = linear(SIZE, INNER), linear(INNER, SIZE), norm("rms"), norm("rms")
    for module in (reader, last, following, output):
        assert module is not None
        arrange_layers(module, device)
    assert following is not None
    fused: Any = following.kernel
    left: Any = reader.kept().product  # type: ignore[union-attr]

    def read(rows: int, by: Linear | None, of_output: Normalization | None = None) -> Any:
        stream = ResidualStream(torch.randn(rows, SIZE, dtype=FLOAT))
        stream.add(Unfinished(last, torch.randn(rows, INNER, dtype=FLOAT)), of_output)
        x = stream.normed(following, by)
        torch.testing.assert_close(reader(x), reader(following(stream.rows)))  # type: ignore[misc]
        return x

    assert isinstance(read(2, reader), DeferredNorm)
    assert (left.completed, fused.of_sums) == (1, 0)
    for rows, by, of_output in ((2, None, None), (ROWS, reader, None), (2, reader, output)):
        assert isinstance(read(rows, by, of_output), Tensor)
    assert (left.completed, fused.of_sums) == (1, 3)


def test_joined_streams_keep_computed_norms() -> None:
    torch.manual_seed(0)
    last, following = linear(INNER, SIZE), norm("rms")
    assert following is not None
    arrange_layers(following, FusingDevice(CPU))
    parts = []
    for rows in (2, 3):
        stream = ResidualStream(torch.randn(rows, SIZE, dtype=FLOAT))
        stream.add(Unfinished(last, torch.randn(rows, INNER, dtype=FLOAT)))
        stream.finish(following)
        parts.append(stream)
    whole = ResidualStream.joined(parts)
    known = whole.known
    torch.testing.assert_close(known, following(whole.rows))
    assert whole.normed(following) is known
    assert whole.known is None
    assert ResidualStream.joined(parts[:1]) is parts[0]


@pytest.mark.parametrize("post", [False, True])
def test_added_blocks_wait_for_their_norm(post: bool) -> None:
    """Reading the rows computes them, once."""
    calls = []

    class Counted(Linear):
        def forward(self, x: Any, residual: Tensor | None = None) -> Tensor:
            calls.append(len(x))
            return super().forward(x, residual)

    last = Counted(INNER, SIZE, bias=False, dtype=FLOAT, device=CPU)
    last.weight.data.normal_()
    stream = ResidualStream(torch.ones(ROWS, SIZE, dtype=FLOAT), post_norm=post)
    stream.add(Unfinished(last, torch.ones(ROWS, INNER, dtype=FLOAT)))
    stream.narrow(torch.tensor([1, 2]))
    assert not calls
    assert len(stream.rows) == len(stream.rows) == 2
    assert calls == [2]
