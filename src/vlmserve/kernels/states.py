"""The states of layers without attention, the rows of a step that change them, and the interface of their kernels.

A state has the same size at any length of its sequence. There is one pool of slots for the whole model: slot `i` of
every layer belongs together. Rows that only pad a batch use slot 0, which no sequence has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vlmserve.kernels.transfers import to_device
from vlmserve.layer_specs import NO_SLOT, PADDING_SLOT


@dataclass(frozen=True, slots=True, weakref_slot=True)
class StateCache:
    """The states of one layer, by slot. `StateSpec` has the shapes of a slot."""

    tail: Tensor
    """``[slots, kernel - 1, channels]``: the last inputs of the convolution, the oldest first."""
    states: Tensor | None = None
    """float32 ``[slots, value_heads, key_size, value_size]``. None: the layer has a tail only."""

    @property
    def tensors(self) -> list[Tensor]:
        """All that slots consist of."""
        return [self.tail] if self.states is None else [self.tail, self.states]


class Segments(NamedTuple):
    """Consecutive rows of one sequence, between two states that are read or written. int32, on the host.

    A segment without rows copies its source.
    """

    starts: np.ndarray
    """``[segments + 1]``: first row of each segment; the last is the number of rows."""
    sources: np.ndarray
    """``[segments]``: slot of the state before the segment, or `NO_SLOT`."""
    targets: np.ndarray
    """``[segments]``: slot that gets the state after the segment's last row. May be the source."""
    positions: np.ndarray
    """``[segments]``: tokens of the sequence before the segment."""
    sequences: np.ndarray
    """``[sequences + 1]``: first segment of each sequence. Segments of a sequence depend on each other in order,
    sequences do not."""

    @classmethod
    def of_chunks(
        cls,
        chunks: Sequence[tuple[int, int]],
        slots: Sequence[int],
        sources: Mapping[int, int] | None = None,
        checkpoints: Mapping[int, Mapping[int, int]] | None = None,
    ) -> Segments:
        """From the positions ``start <= i < end`` of each sequence's rows and its working slot.

        sources: by index of the sequence, the slot that its first segment reads. Other sequences read their working
        slot, or begin at position 0 with zeros. checkpoints: by index of the sequence, the slot that gets the state
        after a number of tokens ``start < n <= end``.
        """
        sources, checkpoints = sources or {}, checkpoints or {}
        segments: list[tuple[int, int, int, int]] = []
        sequences, rows = [0], 0
        for index, ((start, end), slot) in enumerate(zip(chunks, slots, strict=True)):
            source = sources.get(index, slot if start else NO_SLOT)
            first = start
            for reached, target in (*sorted(checkpoints.get(index, {}).items()), (end, slot)):
                segments.append((rows + first - start, source, target, first))
                first, source = reached, target
            rows += end - start
            sequences.append(len(segments))
        # Copied, because kernels read each array from its address on.
        starts, read, written, positions = np.array(segments, np.int32).reshape(-1, 4).T.copy()
        return cls(np.append(starts, np.int32(rows)), read, written, positions, np.array(sequences, np.int32))


@dataclass(frozen=True, slots=True)
class StateRows:
    """The segments of a flat batch. Tensors as `Segments` describes, on the model's device."""

    starts: Tensor
    sources: Tensor
    targets: Tensor
    positions: Tensor
    sequences: Tensor
    host: Segments
    """The same, readable without synchronizing with the device."""

    @property
    def tensors(self) -> list[Tensor]:
        return [self.starts, self.sources, self.targets, self.positions, self.sequences]

    @classmethod
    def of(cls, segments: Segments, device: torch.device | None = None) -> StateRows:
        on = device or torch.device("cpu")
        starts, sources, targets, positions, sequences = (to_device(torch.tensor(one), on) for one in segments)
        return cls(starts, sources, targets, positions, sequences, segments)

    @classmethod
    def of_prompts(cls, lengths: Sequence[int], device: torch.device | None = None) -> StateRows:
        """Whole prompts, whose states nothing reads afterwards."""
        return cls.of(Segments.of_chunks([(0, length) for length in lengths], [PADDING_SLOT] * len(lengths)), device)

    @property
    def num_decodes(self) -> int:
        """Leading sequences with one segment of one row."""
        ends = np.flatnonzero((self.host.sequences != np.arange(len(self.host.sequences)))[1:])
        sequences = int(ends[0]) if len(ends) else len(self.host.sequences) - 1
        longer = np.flatnonzero(np.diff(self.host.starts[: sequences + 1]) != 1)
        return int(longer[0]) if len(longer) else sequences


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a layer with the gated delta rule that are no linears."""

    convolution: Tensor
    """``[channels, kernel]``."""
    decay: Tensor
    """float32 ``[value_heads]``: ``-exp(A_log)``."""
    dt_bias: Tensor
    """float32 ``[value_heads]``."""
    norm: Tensor
    """``[value_size]``: weight of the RMSNorm of each value head."""
    eps: float
    """Epsilon of the norm."""


class DeltaKernel(Protocol):
    """The gated delta rule of a layer, with the convolution before it and the gated norm after it."""

    def __call__(self, mixed: Tensor, gates: Tensor, cache: StateCache, rows: StateRows) -> Tensor:
        """``[tokens, q | k | v | z]`` and ``[tokens, b | a]`` to ``[tokens, value_heads * value_size]``, and states of
        segments.

        mixed: queries and keys have ``key_heads * key_size`` elements, v and z ``value_heads * value_size``. gates: b
        and a have ``value_heads`` elements. q, k and v go through a causal convolution and SiLU. Queries and keys
        become ``x * rsqrt(sum(x ** 2) + 1e-6)`` for each head, queries times ``key_size ** -0.5``. The state of a head
        decays by ``exp(decay * softplus(a + dt_bias))``, and ``sigmoid(b)`` is the step size of its update. The result
        of each head goes through an RMSNorm, times its weight, times ``silu(z)``.
        """
        ...


class ConvolutionKernel(Protocol):
    """A gated short convolution."""

    def __call__(self, mixed: Tensor, cache: StateCache, rows: StateRows) -> Tensor:
        """``[tokens, B | C | x]`` to ``C * convolution(B * x)``, ``[tokens, channels]``, and tails of segments."""
        ...
