"""States of layers without attention, and the interface of their kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vlmserve.kernels.transfers import to_device
from vlmserve.layer_specs import MAX_STATE_DRAFTS, NO_SLOT, PADDING_SLOT


@dataclass(frozen=True, slots=True, weakref_slot=True)
class StateCache:
    """Slot 0 is for padding rows. `StateSpec` defines the shapes."""

    tail: Tensor
    """``[slots, kernel - 1, channels]``: last inputs of the convolution, oldest first."""
    states: Tensor | None = None
    """float32 ``[slots, value_heads, key_size, value_size]``. None: the layer only has a tail."""
    drafts: Tensor | None = None
    """``[places * MAX_STATE_DRAFTS, draft_width]``: the last step's drafts. None: no drafts."""

    @property
    def tensors(self) -> list[Tensor]:
        return [self.tail] if self.states is None else [self.tail, self.states]


class Drafts(NamedTuple):
    """The drafts of a sequence, which has one segment in the step.

    The kernel keeps the segment's last rows instead of advancing the state. The next step applies the accepted ones.
    """

    place: int
    """Index of the rows that keep drafts."""
    accepted: int
    """Kept rows that advance the state before the segment's rows."""
    number: int
    """Last rows of the segment that advance no state."""


class Segments(NamedTuple):
    """Consecutive rows between two states that are read or written. int32, on the host.

    Without rows, a segment copies its source.
    """

    starts: np.ndarray
    """``[segments + 1]``: first row of each segment, then the number of rows."""
    sources: np.ndarray
    """``[segments]``: slot to read before the segment, or `NO_SLOT`."""
    targets: np.ndarray
    """``[segments]``: slot to write after the segment. May equal the source."""
    positions: np.ndarray
    """``[segments]``: the sequence's tokens before the segment."""
    sequences: np.ndarray
    """``[sequences + 1]``: first segment of each sequence. Segments of a sequence run in order; sequences are
    independent."""
    drafts: np.ndarray | None = None
    """``[segments, 3]``: first row in `StateCache.drafts`, accepted rows, and drafts. None: no drafts."""

    @classmethod
    def of_chunks(
        cls,
        chunks: Sequence[tuple[int, int]],
        slots: Sequence[int],
        sources: Mapping[int, int] | None = None,
        checkpoints: Mapping[int, Mapping[int, int]] | None = None,
        drafts: Mapping[int, Drafts] | None = None,
    ) -> Segments:
        """Take each sequence's rows at positions ``start <= i < end`` and its working slot.

        sources, checkpoints and drafts are by sequence index. A source is the slot to read; the default is the working
        slot, or zeros at position 0. A checkpoint is the slot for the state after ``start < n <= end`` tokens. Only
        sequences without checkpoints have drafts.
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
        # kernels need contiguous arrays
        starts, read, written, positions = np.array(segments, np.int32).reshape(-1, 4).T.copy()
        starts = np.append(starts, np.int32(rows))
        ends = np.array(sequences, np.int32)
        return cls(starts, read, written, positions, ends, _draft_rows(ends, drafts) if drafts else None)


def _draft_rows(sequences: np.ndarray, drafts: Mapping[int, Drafts]) -> np.ndarray:
    rows = np.zeros((int(sequences[-1]), 3), np.int32)
    for index, (place, accepted, number) in drafts.items():
        assert sequences[index] + 1 == sequences[index + 1], "a sequence with drafts has one segment"
        rows[sequences[index]] = place * MAX_STATE_DRAFTS, accepted, number
    return rows


@dataclass(frozen=True, slots=True)
class StateRows:
    """On the model's device."""

    starts: Tensor
    sources: Tensor
    targets: Tensor
    positions: Tensor
    sequences: Tensor
    host: Segments
    """The segments on the host, which need no synchronization."""
    drafts: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Without drafts, which no graph has."""
        return [self.starts, self.sources, self.targets, self.positions, self.sequences]

    @classmethod
    def of(cls, segments: Segments, device: torch.device | None = None) -> StateRows:
        on = device or torch.device("cpu")
        starts, sources, targets, positions, sequences, *drafts = (
            to_device(torch.tensor(one), on) for one in segments if one is not None
        )
        return cls(starts, sources, targets, positions, sequences, segments, *drafts)

    @classmethod
    def of_prompts(cls, lengths: Sequence[int], device: torch.device | None = None) -> StateRows:
        return cls.of(Segments.of_chunks([(0, length) for length in lengths], [PADDING_SLOT] * len(lengths)), device)

    @property
    def num_decodes(self) -> int:
        """Leading sequences with one segment of one row, and no accepted drafts before it."""
        ends = np.flatnonzero((self.host.sequences != np.arange(len(self.host.sequences)))[1:])
        sequences = int(ends[0]) if len(ends) else len(self.host.sequences) - 1
        counts = np.diff(self.host.starts[: sequences + 1])
        if self.host.drafts is not None:
            counts = counts + self.host.drafts[:sequences, 1]
        longer = np.flatnonzero(counts != 1)
        return int(longer[0]) if len(longer) else sequences


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    convolution: Tensor
    """``[channels, kernel]``."""
    decay: Tensor
    """float32 ``[value_heads]``: ``-exp(A_log)``."""
    dt_bias: Tensor
    """float32 ``[value_heads]``."""
    norm: Tensor
    """``[value_size]``: RMSNorm weight of each value head."""
    eps: float


class DeltaKernel(Protocol):
    """Includes the convolution before it and the gated norm after it."""

    def __call__(self, mixed: Tensor, gates: Tensor, cache: StateCache, rows: StateRows) -> Tensor:
        """Compute rows and update the segments' states.

        mixed: ``[tokens, q | k | v | z]``; q and k have ``key_heads * key_size`` elements, v and z ``value_heads *
        value_size``. gates: ``[tokens, b | a]``, ``value_heads`` elements each. Returns ``[tokens, value_heads *
        value_size]``.

        - q, k and v go through a causal convolution and SiLU.
        - q and k of each head become ``x * rsqrt(sum(x ** 2) + 1e-6)``; q is also scaled by ``key_size ** -0.5``.
        - States decay by ``exp(decay * softplus(a + dt_bias))``; the step size is ``sigmoid(b)``.
        - Results are ``RMSNorm(x) * silu(z)``.
        """
        ...


class ConvolutionKernel(Protocol):
    def __call__(self, mixed: Tensor, cache: StateCache, rows: StateRows) -> Tensor:
        """Map ``[tokens, B | C | x]`` to ``C * convolution(B * x)``, ``[tokens, channels]``. Updates the tails."""
        ...
