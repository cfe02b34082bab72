"""The inputs that all layers of a step share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vlmserve.kernels.adapters import AdapterRows
from vlmserve.kernels.attention import BatchMetadata
from vlmserve.kernels.states import StateCache
from vlmserve.layers.rope import RopeTables


@dataclass(frozen=True, slots=True)
class StepContext:
    metadata: BatchMetadata
    ropes: Sequence[RopeTables]
    """Rotary embeddings, for each kind that layers use."""
    plan: object
    """Result of `AttentionBackend.prepare`."""
    query_scale: Tensor | None = None
    """``[tokens, 1]``, factor of queries; None: 1."""
    adapters: AdapterRows | None = None
    """The slot of each row's adapter; None: no row has one."""
    states: Sequence[StateCache] = ()
    """One for each layer with states."""
