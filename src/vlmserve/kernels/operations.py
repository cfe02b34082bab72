"""The interface of a device's layer kernels."""

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
"""``[..., size]`` to the same shape."""
ALL_QUERIES = slice(None)


class EncoderKernel(Protocol):
    def __call__(self, qkv: Tensor, *, queries: slice = ALL_QUERIES) -> Tensor:
        """Map ``[images, tokens, 3 * size]`` to ``[images, queries, size]``. queries: rows, without step."""
        ...


HeadsNorm = Callable[[Tensor], None]
"""Norms heads of ``[tokens, (heads + 2 * kv_heads) * head_size]`` in place. Queries come before keys, keys before
values."""
GateKernel = Callable[[Tensor, Tensor], Tensor]
"""Multiplies ``[tokens, size]`` by the sigmoid of ``[tokens, gates]``, possibly in place. ``size / gates`` adjacent
elements share a gate."""
RotationKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rotates queries and keys of ``[rows, 3 * size]`` in place and returns it. Cosines and sines: float32 ``[rows, 1,
head_size / 2]``."""


@dataclass(frozen=True, slots=True)
class NormedHeads:
    """Adjacent heads, each normed separately."""

    first: int
    """Index of the first element."""
    weight: Tensor
    """float32 ``[heads, size]``."""
    eps: float
    centered: bool
    """Subtract the mean, as LayerNorm does."""
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Epilogue:
    activation: str | None = None
    """Hugging Face name. An unknown name raises UnsupportedModelError."""
    gated: bool = False
    """The first half of the outputs are gates, the second half ups. The result is ``activation(gate) * up``, half as
    wide."""
    float_output: bool = False

    def __post_init__(self) -> None:
        if self.activation is not None:
            activation(self.activation)


NO_EPILOGUE = Epilogue()


class LinearKernel(Protocol):
    """A weight in a device's layout, with its epilogue."""

    @property
    def num_bytes(self) -> int: ...

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        adapters: LinearAdapters | None = None,
    ) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, half as wide if gated.

        out: contiguous memory that the result may use. adapters: change the rows that have one.
        """
        ...


class NormedRows(NamedTuple):
    rows: Tensor
    normed: Tensor


@runtime_checkable
class AddingNorm(Protocol):
    """Can add a residual. Tensors are ``[..., size]`` of one dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, residual: Tensor) -> Tensor: ...


@runtime_checkable
class SummingNorm(AddingNorm, Protocol):
    def of_sum(self, x: Tensor, residual: Tensor, first: Norm | None = None) -> NormedRows:
        """Return ``x + residual`` and its norm. first: another norm, applied to x."""
        ...


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """The next matmul applies the norm's factor to its sums."""

    rows: Tensor
    """``[rows, size]``, before the norm."""
    weighted: Tensor
    """`rows` multiplied by the norm's weight."""
    squares: Tensor
    """float32 ``[rows, columns]``: partial sums of squares of each row."""
    norm: Norm
    eps: float

    @property
    def normed(self) -> Tensor:
        return self.norm(self.rows)


Rounding = Literal["int8", "float8"]
"""How a matmul rounds inputs: int8 with a scale for each 128 inputs, or float8 with a scale for each row."""


class RoundedRows(NamedTuple):
    values: Tensor
    """``[rows, size]``: int8, or uint8 with float8 bits."""
    scales: Tensor
    """float32 ``[rows, groups]``."""


Inputs = Tensor | RoundedRows
Normed = Inputs | DeferredNorm
"""Normed rows, for the next linear."""


@runtime_checkable
class RoundingNorm(SummingNorm, Protocol):
    """Rounds its result like the next matmul, bit for bit."""

    def rounded(self, x: Tensor, rounding: Rounding) -> RoundedRows: ...

    def rounded_sum(
        self, x: Tensor, residual: Tensor, first: Norm | None, rounding: Rounding
    ) -> tuple[Tensor, RoundedRows]: ...


@runtime_checkable
class RoundingLinearKernel(Protocol):
    """May round its inputs, or take rounded inputs."""

    def rounding(self, rows: int) -> Rounding | None: ...

    def of_rounded(self, x: RoundedRows, residual: Tensor | None = None) -> Tensor:
        """Like `LinearKernel.__call__`, without adapters."""
        ...

    def rounded(self, x: Inputs, rounding: Rounding) -> RoundedRows | None:
        """Map ``[rows, in_features]``, rounded for the next matmul. None: it cannot."""
        ...


@runtime_checkable
class DeferringLinearKernel(Protocol):
    """May leave the following norm to the next linear, and completes such a norm."""

    def completes(self, rows: int) -> bool: ...

    def complete(self, x: DeferredNorm) -> Tensor:
        """Without adapters. The number of rows must pass `completes`."""
        ...

    def deferring(self, x: Tensor, residual: Tensor, norm: Norm) -> DeferredNorm | None:
        """Multiply ``[rows, in_features]`` without adapters, plus residual, before `norm`.

        None: compute the norm separately.
        """
        ...


class Table(LinearKernel, Protocol):
    """The weight is also an embedding table. Results are float32."""

    def rows(self, indices: Tensor) -> Tensor:
        """Return ``[count, in_features]`` in the model's dtype. indices: int64 ``[count]``."""
        ...


ExpertKernels = tuple[LinearKernel, LinearKernel]
"""An expert's two linears: gates and ups (``[size]`` to ``[inner_size]``), and down."""


@dataclass(frozen=True, slots=True)
class RouterWeights:
    product: LinearKernel
    """Expert scores from float32 rows."""
    correction: Tensor | None = None
    """``[count]``: added to scores for selection only."""
    norm: Tensor | None = None
    """``[size]``: RMSNorm weight of the router's input. None: no norm."""
    input_norm: Tensor | None = None
    """``[size]``: RMSNorm weight of the experts' input. None: no norm."""
    factors: Tensor | None = None
    """``[count]``: factor of each expert's weight."""


class ExpertsKernel(Protocol):
    def __call__(self, x: Tensor, residual: Tensor | None = None, *, float_output: bool = False) -> Tensor:
        """Map ``[rows, size]`` to the weighted sum of each row's experts, plus a residual.

        float_output: result and residual are float32.
        """
        ...


class Operations:
    """A device's kernels. Functions that return None leave the operation to torch."""

    def multiplies(self, weight: QuantizedWeight) -> bool:
        return weight.is_supported

    def multiplies_superblocks(self, input_bits: int | None) -> bool:
        """input_bits: requested, None for the default."""
        return False

    def product_inputs(self, in_features: int, dtype: torch.dtype) -> int:
        """The fastest number for a plain linear. Extra inputs are zeros."""
        return in_features

    def linear(self, weight: AnyWeight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype) -> LinearKernel:
        raise NotImplementedError

    def table(self, weight: AnyWeight, dtype: torch.dtype) -> Table:
        """An embedding table ``[count, size]`` is also the output head. dtype: of rows and inputs."""
        raise NotImplementedError

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0) -> Norm | None:
        """weight, bias: ``[size]``. offset: added to the weight in float32."""
        return None

    def heads_norm(self, parts: Sequence[NormedHeads], dtype: torch.dtype) -> HeadsNorm | None:
        return None

    def output_gate(self, dtype: torch.dtype) -> GateKernel | None:
        return None

    def experts(
        self, spec: ExpertsSpec, router: RouterWeights | None, experts: Mapping[int, ExpertKernels]
    ) -> ExpertsKernel | None:
        """None: run experts one by one.

        router: None if some weights have reordered inputs or outputs. experts: by number, this rank's only.
        """
        return None

    def encoder_attention(self, num_heads: int, head_size: int, dtype: torch.dtype) -> EncoderKernel | None:
        """Full attention within each image."""
        return None

    def encoder_rotation(self, dtype: torch.dtype) -> RotationKernel | None:
        return None

    def encoder_ranges(self, num_heads: int, head_size: int, dtype: torch.dtype) -> RangeKernels | None:
        """None: computing images of several sizes together is not faster."""
        return None

    def delta(self, spec: DeltaSpec, weights: DeltaWeights, dtype: torch.dtype) -> DeltaKernel | None:
        return None

    def convolution(self, spec: ConvolutionSpec, weight: Tensor, dtype: torch.dtype) -> ConvolutionKernel | None:
        return None
