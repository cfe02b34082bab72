"""The interface of a device's kernels for layers: linears, norms, attention of vision towers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from vlmserve.families.spec import ExpertsSpec
from vlmserve.kernels.activation import activation
from vlmserve.kernels.adapters import LinearAdapters
from vlmserve.kernels.gguf_weight import GGUFWeight
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.kernels.ranges import RangeKernels
from vlmserve.kernels.states import ConvolutionKernel, DeltaKernel, DeltaWeights
from vlmserve.layer_specs import ConvolutionSpec, DeltaSpec

AnyWeight = Tensor | QuantizedWeight | GGUFWeight
"""``[out_features, in_features]``."""
Norm = Callable[[Tensor], Tensor]
"""``[..., size]`` to the same."""
ALL_QUERIES = slice(None)


class EncoderKernel(Protocol):
    """Full attention within each image, see `EncoderAttention`."""

    def __call__(self, qkv: Tensor, *, queries: slice = ALL_QUERIES) -> Tensor:
        """``[images, tokens, 3 * size]`` to ``[images, queries, size]``. queries: the rows to compute, without step."""
        ...


HeadsNorm = Callable[[Tensor], None]
"""Norms heads of ``[tokens, (heads + 2 * kv_heads) * head_size]``, queries before keys before values, in place."""
GateKernel = Callable[[Tensor, Tensor], Tensor]
"""Multiplies ``[tokens, size]`` by the sigmoids of ``[tokens, gates]``. ``size / gates`` neighbouring elements share a
gate. It may change the former in place."""
RotationKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values ``[rows, 3 * size]``, cosines and sines, float32 ``[rows, 1, head_size / 2]``, to the first,
rotated in place."""


@dataclass(frozen=True, slots=True)
class NormedHeads:
    """Neighbouring heads of a row, each normed by itself."""

    first: int
    """The first element of a row."""
    weight: Tensor
    """float32 ``[heads, size]``."""
    eps: float
    centered: bool
    """Subtract the mean, as LayerNorm does."""
    bias: Tensor | None = None
    """As `weight`."""


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What a product does to its outputs before it returns them.

    activation: by its Hugging Face name; None: none. gated: the first half of the outputs are gates, the second half
    ups; the result is ``activation(gate) * up``, half as wide. float_output: the result is float32, whatever the inputs
    are. Raises UnsupportedModelError for an unknown activation.
    """

    activation: str | None = None
    gated: bool = False
    float_output: bool = False

    def __post_init__(self) -> None:
        if self.activation is not None:
            activation(self.activation)


NO_EPILOGUE = Epilogue()


class Product(Protocol):
    """A weight as a device stores it, with what follows the multiplication."""

    @property
    def num_bytes(self) -> int:
        """Memory of the weight."""
        ...

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        adapters: LinearAdapters | None = None,
    ) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, half as many if the epilogue is gated.

        residual: shaped like the result, added to it. out: contiguous memory that the result may take. adapters: change
        the rows that have one.
        """
        ...


class NormedRows(NamedTuple):
    """Rows, and what a norm makes of them, shaped alike."""

    rows: Tensor
    normed: Tensor


@runtime_checkable
class AddingNorm(Protocol):
    """A `Norm` that adds a residual to its result. All tensors are ``[..., size]``, of one type."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The norm of x, plus a residual."""
        ...


@runtime_checkable
class SummingNorm(AddingNorm, Protocol):
    """An `AddingNorm` that also norms sums."""

    def of_sum(self, x: Tensor, residual: Tensor, first: Norm | None = None) -> NormedRows:
        """x plus a residual, and the norm of that. first: another norm of the same device, which x
        goes through before."""
        ...


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """Rows before an RMSNorm. The matmul that reads them applies the norm's factor to its sums.

    rows: ``[rows, size]``, before the norm. weighted: the same times the norm's weight. squares: float32
    ``[rows, columns]``, sums of squares of parts of each row. norm: the norm itself, with that `eps`.
    """

    rows: Tensor
    weighted: Tensor
    squares: Tensor
    norm: Norm
    eps: float

    @property
    def normed(self) -> Tensor:
        """What the norm makes of the rows, by a launch of its own."""
        return self.norm(self.rows)


Rounding = Literal["int8", "float8"]
"""How a matmul rounds its inputs: to int8 with a scale for each 128 inputs, or to float8 with one for each row."""


class RoundedRows(NamedTuple):
    """Inputs of a matmul, as it rounds them."""

    values: Tensor
    """``[rows, size]``: int8, or uint8 with the bits of float8."""
    scales: Tensor
    """float32 ``[rows, groups]``."""


Inputs = Tensor | RoundedRows
Normed = Inputs | DeferredNorm
"""Normed rows, for the linear that reads them."""


@runtime_checkable
class RoundingNorm(SummingNorm, Protocol):
    """A `SummingNorm` that also rounds what it norms, to the same bits as the matmul that reads it."""

    def rounded(self, x: Tensor, rounding: Rounding) -> RoundedRows:
        """The norm of ``[rows, size]``."""
        ...

    def rounded_sum(
        self, x: Tensor, residual: Tensor, first: Norm | None, rounding: Rounding
    ) -> tuple[Tensor, RoundedRows]:
        """See `SummingNorm.of_sum`."""
        ...


@runtime_checkable
class RoundingProduct(Protocol):
    """A `Product` that may round its inputs, or take rounded ones."""

    def rounding(self, rows: int) -> Rounding | None:
        """How it rounds the inputs of a step. None: it does not."""
        ...

    def of_rounded(self, x: RoundedRows, residual: Tensor | None = None) -> Tensor:
        """See `Product`, without adapters."""
        ...

    def rounded(self, x: Inputs, rounding: Rounding) -> RoundedRows | None:
        """The result for ``[rows, in_features]``, rounded for the matmul that reads it. None: it cannot round it."""
        ...


@runtime_checkable
class DeferringProduct(Protocol):
    """A `Product` that may leave a norm behind it to the next one, and completes one that was left to it."""

    def completes(self, rows: int) -> bool:
        """Whether it completes norms of so many rows."""
        ...

    def complete(self, x: DeferredNorm) -> Tensor:
        """The product of normed rows, of which none has an adapter. As many rows as it `completes`."""
        ...

    def deferring(self, x: Tensor, residual: Tensor, norm: Norm) -> DeferredNorm | None:
        """The product plus a residual, for inputs ``[rows, in_features]`` of which none has an adapter, and a norm
        behind it. None: the norm has to be computed by itself."""
        ...


class Table(Product, Protocol):
    """A product whose weight is an embedding table as well. Results are float32."""

    def rows(self, indices: Tensor) -> Tensor:
        """``[count]`` int64 to rows of the weight, ``[count, in_features]`` of the model's type."""
        ...


ExpertProducts = tuple[Product, Product]
"""An expert's gates and ups, ``[size]`` to ``[inner_size]``, and what their result is multiplied with."""


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """Weights that choose and weigh the experts of each row. Tensors are float32."""

    product: Product
    """Scores of experts, from float32 rows."""
    correction: Tensor | None = None
    """``[count]``, added to scores to choose experts, and not to weigh them."""
    norm: Tensor | None = None
    """``[size]``, weights of an RMSNorm of the rows that the router takes. None: it takes the rows."""
    input_norm: Tensor | None = None
    """``[size]``, weights of an RMSNorm of the rows that experts take. None: they take the rows."""
    factors: Tensor | None = None
    """``[count]``, factors of the weights of each expert."""


class ExpertsKernel(Protocol):
    """A router and the experts that it chooses from, see `blocks.experts`."""

    def __call__(self, x: Tensor, residual: Tensor | None = None, *, float_output: bool = False) -> Tensor:
        """``[rows, size]`` to the weighted sums of what each row's experts compute, plus a residual.

        float_output: the result and the residual are float32. Else they are of the model's type.
        """
        ...


class Operations(Protocol):
    """The kernels that a device has for layers."""

    def multiplies(self, weight: QuantizedWeight) -> bool:
        """Whether its kernels multiply with a weight as it is."""
        ...

    def multiplies_superblocks(self, input_bits: int | None) -> bool:
        """Tell whether kernels multiply superblocks of a `GGUFWeight`. input_bits: as asked for; None: by default."""
        ...

    def product_inputs(self, in_features: int, dtype: torch.dtype) -> int:
        """How many inputs a product with a plain weight is to have, which is faster with zeros among them than without;
        at least `in_features`."""
        ...

    def linear(self, weight: AnyWeight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype) -> Product:
        """Store a weight ``[out_features, in_features]`` and its bias ``[out_features]``. dtype: of inputs."""
        ...

    def table(self, weight: AnyWeight, dtype: torch.dtype) -> Table:
        """Store an embedding table ``[count, size]`` that is the output head as well. dtype: of rows and inputs."""
        ...

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0) -> Norm | None:
        """RMSNorm, or LayerNorm where there is a bias; weight and bias: ``[size]``. offset: added to the weight, in
        float32. None: torch's operations."""
        ...

    def heads_norm(self, parts: Sequence[NormedHeads], dtype: torch.dtype) -> HeadsNorm | None:
        """Norms of heads in place. None: torch's operations."""
        ...

    def output_gate(self, dtype: torch.dtype) -> GateKernel | None:
        """The output gate of attention. None: torch's operations."""
        ...

    def experts(
        self, spec: ExpertsSpec, router: RouterWeights | None, experts: Mapping[int, ExpertProducts]
    ) -> ExpertsKernel | None:
        """A mixture of experts. None: one product after the other.

        router: None if inputs or outputs of some weights are in another order. experts: by number, without other ranks'
        experts.
        """
        ...

    def encoder_attention(self, num_heads: int, head_size: int, dtype: torch.dtype) -> EncoderKernel | None:
        """Full attention within each image. None: torch's operations."""
        ...

    def encoder_rotation(self, dtype: torch.dtype) -> RotationKernel | None:
        """Rotary positions of patches. None: torch's operations."""
        ...

    def encoder_ranges(self, num_heads: int, head_size: int, dtype: torch.dtype) -> RangeKernels | None:
        """Attention within images of several sizes, where it pays to compute them together. None: it does not."""
        ...

    def delta(self, spec: DeltaSpec, weights: DeltaWeights, dtype: torch.dtype) -> DeltaKernel | None:
        """The gated delta rule of one layer. dtype: of rows. None: torch's operations."""
        ...

    def convolution(self, spec: ConvolutionSpec, weight: Tensor, dtype: torch.dtype) -> ConvolutionKernel | None:
        """The gated short convolution of one layer. weight: ``[channels, kernel]``. dtype: of rows. None: torch's
        operations."""
        ...
