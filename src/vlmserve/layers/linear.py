"""Linear layers and embeddings. Parameters start empty; the weight loader fills them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.kernels.adapters import (
    AdapterRows,
    Change,
    LinearAdapters,
    PacksChanges,
    PreparedChange,
    ReservesRanks,
    TableAdapters,
)
from vlmserve.kernels.gguf_weight import GGUFWeight
from vlmserve.kernels.operations import (
    AnyWeight,
    DeferredNorm,
    DeferringLinearKernel,
    Epilogue,
    Inputs,
    LinearKernel,
    Normed,
    Operations,
    Rounding,
    RoundingLinearKernel,
    Table,
)
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.kernels.torch_products import torch_linear, torch_table
from vlmserve.layers.cut import Shard
from vlmserve.layers.layer import Factory, Layer
from vlmserve.layers.padding import Padding

META = torch.device("meta")
_takes_memory: ContextVar[bool] = ContextVar("takes_memory", default=True)


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Parameters get no memory in this block; `allocate` adds it."""
    token = _takes_memory.set(False)
    try:
        yield
    finally:
        _takes_memory.reset(token)


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Pages stay untouched until the loader writes them."""
    on = device if _takes_memory.get() else META
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=on), requires_grad=False)


@dataclasses.dataclass(frozen=True, slots=True)
class KeptWeight:
    """Lets another layer use a packed weight."""

    product: LinearKernel
    bits: int | None
    input_order: Tensor | None = None
    order: Tensor | None = None


class Weight(Layer):
    """`weight`, ``[out_features, in_features]`` or more axes for a convolution, exists until quantized or packed."""

    weight: nn.Parameter
    makes_logits = False
    """True for output heads: 8-bit weights then keep 16-bit inputs."""
    takes_adapters = True
    """False if its rows are not the rows of the step."""
    chosen_rows: Tensor | None = None
    """int64, the rows of the step to compute; None: all."""
    shard: Shard | None = None

    def __init__(self, in_features: int, out_features: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, **factory)
        self.in_features, self.out_features = in_features, out_features
        self.dtype = factory["dtype"]
        self.bits: int | None = None
        self.adapters: LinearAdapters | None = None
        self.device = factory["device"]
        self.input_order: Tensor | None = None
        """int64, the input that each column of the weight multiplies. None: in order."""
        self._quantized: QuantizedWeight | GGUFWeight | None = None

    def settle(self) -> None:
        """Reorder outputs, after loading and before packing."""

    @property
    def products(self) -> int:
        return self.in_features * self.out_features

    @property
    def num_bytes(self) -> int:
        if self._stored is not None:
            return self._stored.num_bytes
        if self._quantized is not None:
            return self._quantized.num_bytes
        return self.in_features * self.out_features * self.dtype.itemsize

    def quantize(self, weight: QuantizedWeight | GGUFWeight, input_bits: int | None = None) -> None:
        """input_bits: overrides the weight's own."""
        if input_bits is not None:
            weight = dataclasses.replace(weight, input_bits=input_bits)
        if self.makes_logits and weight.bits == 8:
            weight = dataclasses.replace(weight, input_bits=16)
        if isinstance(weight, QuantizedWeight):
            self.input_order = weight.order
            weight = dataclasses.replace(weight, order=None)
        self._quantized = weight
        self.bits = weight.bits
        del self.weight

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def is_stored(self) -> bool:
        return self._stored is not None

    def kept(self) -> KeptWeight | None:
        return None if self._stored is None else KeptWeight(self._stored, self.bits, self.input_order)

    def restore(self, kept: KeptWeight) -> None:
        self.bits, self.input_order = kept.bits, kept.input_order
        del self.weight

    def adapt(self, rows: AdapterRows, parts: int = 1, max_rank: int = 0) -> None:
        """Call it after `arrange`.

        rows: the slot of each row. parts: number with their own A and B. max_rank: rank to reserve.
        """
        stored: object = self._stored
        words = stored.change_words if isinstance(stored, PacksChanges) else 1
        reserved = stored.reserved_rank(parts, max_rank) if max_rank and isinstance(stored, ReservesRanks) else None
        self.adapters = LinearAdapters(rows, words, reserved)

    def prepare(self, change: Change) -> PreparedChange:
        change = change.to(self.dtype, self.device)
        if self.input_order is not None:
            change = change.with_inputs(self.input_order)
        stored: object = self._stored
        if not isinstance(stored, PacksChanges) or not change.adds:
            return PreparedChange(change, None)
        rest = dataclasses.replace(change, parts=(), factor=None, shift=None)
        return PreparedChange(rest, stored.pack_change(change))

    def set_adapter(self, slot: int, prepared: PreparedChange | None) -> None:
        """None: clear the slot."""
        assert self.adapters is not None
        self.adapters.set(slot, prepared)

    @property
    def _stored(self) -> LinearKernel | None:
        raise NotImplementedError

    def _matrix(self) -> AnyWeight:
        return self.weight.data.flatten(1) if self._quantized is None else self._quantized

    def _drop(self) -> None:
        if self._quantized is None:
            del self.weight
        self._quantized = None


class Linear(Weight):
    """``act(linear(x))``, ``[..., in_features]`` to ``[..., out_features]``. act: Hugging Face's name."""

    bias: nn.Parameter | None
    stays_plain = False
    """True if only an override quantizes it."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, act: str | None = None, **factory: Unpack[Factory]
    ) -> None:
        super().__init__(in_features, out_features, **factory)
        self.bias = empty_parameter(out_features, **factory) if bias else None
        self.epilogue = Epilogue(act)
        self.order: Tensor | None = None
        self._product: LinearKernel | None = None
        self._deferring: DeferringLinearKernel | None = None
        self._rounding: RoundingLinearKernel | None = None
        self._width: int | None = None
        self._padding: Padding | None = None

    def forward(self, x: Normed, residual: Tensor | None = None) -> Tensor:
        """residual: added to the output, same shape."""
        if isinstance(x, DeferredNorm):
            assert residual is None
            return self._multiply(x.normed) if self.deferring is None else self.deferring.complete(x)
        return self._of(x, residual)

    def _of(self, x: Inputs, residual: Tensor | None = None) -> Tensor:
        if isinstance(x, Tensor) or self._rounding is None:
            return self._multiply(cast(Tensor, x), residual)
        return self._rounding.of_rounded(x, residual)

    @property
    def deferring(self) -> DeferringLinearKernel | None:
        """None: the kernel cannot leave norms to the next linear, or rows change in between."""
        return self._deferring if self._is_plain else None

    def rounding(self, rows: int) -> Rounding | None:
        """None: the kernel rounds no inputs, or rows change before it."""
        return self._rounding.rounding(rows) if self._rounding is not None and self._is_plain else None

    def read_by(self, reader: Linear, x: Normed) -> Inputs:
        """The form that `reader`, its only reader, takes."""
        rounded: Inputs | None = None
        if self._rounding is not None and self._is_plain and not isinstance(x, DeferredNorm):
            values = x if isinstance(x, Tensor) else x.values
            rounding = reader.rounding(len(values)) if values.ndim == 2 else None
            rounded = None if rounding is None else self._rounding.rounded(x, rounding)
        return cast(Tensor, self(x)) if rounded is None else rounded

    @property
    def _is_plain(self) -> bool:
        """True if nothing changes the kernel's inputs or result."""
        changes = self._padding is not None or self.input_order is not None
        return not changes and (self.adapters is None or not self.adapters.active)

    def _multiply(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        product = self._product or self._by_torch()
        if self._padding is not None:
            x = self._padding.fit(x)
        inputs = x if self.input_order is None else x.index_select(-1, self.input_order)
        if self.adapters is None:
            return product(inputs, residual, out)
        output = product(inputs, residual, out, self.adapters)
        return self.adapters.replace(x, residual, output, self._finish) if self.adapters.replaces else output

    def _finish(self, weight: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor | None) -> Tensor:
        return torch_linear(weight, bias, self.epilogue, self.dtype)(x, residual)

    def prepare(self, change: Change) -> PreparedChange:
        return super().prepare(change if self._padding is None else self._padding.of_change(change))

    def widen_for(self, reader: Linear, operations: Operations) -> None:
        """Pad outputs for `reader`, their only reader, before either is arranged.

        The padding is zero if the activation maps 0 to 0.
        """
        if self.bits is None and reader.bits is None:
            self._width = operations.product_inputs(reader.in_features, reader.dtype)

    def reorder(self, rows: Tensor) -> None:
        """Call before `arrange`. rows: old index of each new output."""
        self.order = rows
        if self._quantized is None:
            self.weight.data = self.weight.data[rows]
        else:
            self._quantized = self._quantized[rows]
        if self.bias is not None:
            self.bias.data = self.bias.data[rows]

    def arrange(self, operations: Operations) -> None:
        if self._product is None:
            bias = None if self.bias is None else self.bias.data
            matrix = self._matrix()
            if isinstance(matrix, Tensor):
                inputs, parts = operations.product_inputs(self.in_features, self.dtype), 1 + self.epilogue.gated
                self._padding = Padding.of(matrix.shape, inputs, parts, self._width or self.out_features // parts)
                if self._padding is not None:
                    matrix = self._padding.of_weight(matrix)
                    bias = None if bias is None else self._padding.of_outputs(bias)
            self._compute_by(operations.linear(matrix, bias, self.epilogue, self.dtype))
            self._drop()

    def _compute_by(self, product: LinearKernel) -> None:
        self._product = product
        self._deferring = product if isinstance(product, DeferringLinearKernel) else None
        self._rounding = product if isinstance(product, RoundingLinearKernel) else None

    def kept(self) -> KeptWeight | None:
        kept = super().kept()
        return None if kept is None or self._padding is not None else dataclasses.replace(kept, order=self.order)

    def restore(self, kept: KeptWeight) -> None:
        super().restore(kept)
        self._compute_by(kept.product)
        self.order = kept.order

    @property
    def _stored(self) -> LinearKernel | None:
        return self._product

    def _by_torch(self) -> LinearKernel:
        return torch_linear(self._matrix(), self.bias, self.epilogue, self.dtype)


class MergedLinear(Linear):
    """Linears with the same input as one matmul. parts: outputs by checkpoint name."""

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool, **factory: Unpack[Factory]) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, **factory)
        self.parts = parts
        self.repeated: Mapping[str, str] = {}
        """Parts that checkpoints lack, by the part whose tensors they reuse."""

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        """Targets for each part's tensors: ``("q_proj.weight", rows of the merged weight)``…"""
        start = 0
        for name, size in self.parts.items():
            if "weight" in self._parameters:
                yield f"{name}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{name}.bias", self.bias[start : start + size]
            start += size


class GatedLinear(MergedLinear):
    """``act(gate(x)) * up(x)``. parts: gate and up, equally wide."""

    def __init__(
        self, in_features: int, parts: dict[str, int], act: str, *, bias: bool, **factory: Unpack[Factory]
    ) -> None:
        super().__init__(in_features, parts, bias=bias, **factory)
        self.epilogue = Epilogue(act, gated=True)


class OutputLinear(Linear):
    """The output head: ``[rows, in_features]`` to float32 ``[rows, out_features]``."""

    makes_logits = True

    def __init__(self, in_features: int, out_features: int, *, bias: bool, **factory: Unpack[Factory]) -> None:
        super().__init__(in_features, out_features, bias=bias, **factory)
        self.epilogue = Epilogue(float_output=True)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self._multiply(hidden, out=out)


class Bias(nn.Module):
    def __init__(self, size: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.bias = empty_parameter(size, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.bias)


class Embedding(Layer):
    """int64 ``[tokens]`` to ``[tokens, size]``. `weight`, ``[count, size]``, exists until it is quantized."""

    weight: nn.Parameter
    shard: Shard | None = None

    def __init__(self, count: int, size: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.weight = empty_parameter(count, size, **factory)
        self.count, self.size, self.dtype = count, size, factory["dtype"]
        self.table_adapters: TableAdapters | None = None
        self._quantized: QuantizedWeight | GGUFWeight | None = None
        self._table: Table | None = None

    @property
    def num_bytes(self) -> int:
        stored = self._table or self._quantized
        return self.count * self.size * self.dtype.itemsize if stored is None else stored.num_bytes

    def quantize(self, weight: QuantizedWeight | GGUFWeight) -> None:
        self._quantized = weight
        del self.weight

    def arrange(self, operations: Operations) -> None:
        """A plain table stays."""
        if self._quantized is not None:
            self._table = operations.table(self._quantized, self.dtype)
            self._quantized = None

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.count, self.size

    @property
    def is_stored(self) -> bool:
        return self._table is not None

    def kept(self) -> KeptWeight | None:
        return None if self._table is None else KeptWeight(self._table, None)

    def restore(self, kept: KeptWeight) -> None:
        self._table = cast(Table, kept.product)
        del self.weight

    def adapt_table(self, rows: AdapterRows) -> None:
        self.table_adapters = TableAdapters(rows)

    def forward(self, indices: Tensor) -> Tensor:
        table = self._table
        if self._quantized is not None:
            table = torch_table(self._quantized, self.dtype)
        vectors = F.embedding(indices, self.weight) if table is None else table.rows(indices)
        return vectors if self.table_adapters is None else self.table_adapters.apply(indices, vectors)


class TiedEmbedding(Weight):
    """An embedding table that is also the output head: int64 ``[tokens]`` to ``[tokens, size]``."""

    makes_logits = True

    def __init__(self, count: int, size: int, **factory: Unpack[Factory]) -> None:
        super().__init__(size, count, **factory)
        self.table_adapters: TableAdapters | None = None
        self._table: Table | None = None

    def adapt_table(self, rows: AdapterRows) -> None:
        self.table_adapters = TableAdapters(rows)

    def forward(self, indices: Tensor) -> Tensor:
        vectors = (self._table or self._by_torch()).rows(indices)
        return vectors if self.table_adapters is None else self.table_adapters.apply(indices, vectors)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """``[rows, size]`` to float32 ``[rows, count]``. out: contiguous memory for the result."""
        table = self._table or self._by_torch()
        if self.adapters is None:
            return table(hidden, out=out)
        logits = table(hidden, out=out, adapters=self.adapters)
        return self.adapters.replace(hidden, None, logits, self._finish) if self.adapters.replaces else logits

    def _finish(self, weight: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor | None) -> Tensor:
        return torch_table(weight, self.dtype)(x, residual)

    def arrange(self, operations: Operations) -> None:
        if self._table is None:
            self._table = operations.table(self._matrix(), self.dtype)
            self._drop()

    def restore(self, kept: KeptWeight) -> None:
        super().restore(kept)
        self._table = cast(Table, kept.product)

    @property
    def _stored(self) -> LinearKernel | None:
        return self._table

    def _by_torch(self) -> Table:
        return torch_table(self._matrix(), self.dtype)
