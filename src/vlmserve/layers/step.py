"""The input that all layers of one step share."""

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
    """The input that all layers of one step share, besides rows and caches."""

    metadata: BatchMetadata
    ropes: Sequence[RopeTables]
    """The rotations that layers use."""
    plan: object
    """Result of `AttentionBackend.prepare`."""
    query_scale: Tensor | None = None
    """``[tokens, 1]``, factor of queries. None: 1."""
    adapters: AdapterRows | None = None
    """Which rows have an adapter. None: no row has one."""
    states: Sequence[StateCache] = ()
    """One for each layer with states."""
