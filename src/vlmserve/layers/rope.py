"""Rotary position embeddings (https://arxiv.org/abs/2104.09864) and extensions to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from vlmserve.kernels.attention import RotaryRows
from vlmserve.layer_specs import RopeSpec

FIRST_POSITIONS = 1024
"""Initial positions of the tables on a CPU. The tables grow."""
CAPTURED_POSITIONS = 2**15
"""Initial positions on other devices: growing moves the tables, which invalidates captured graphs."""


def frequencies(spec: RopeSpec, device: torch.device, *, long: bool = False, stretch: float = 1.0) -> Tensor:
    """Radians per position, float32 ``[size / 2]``. long: for sequences beyond `switch`. stretch: base factor."""
    exponents = torch.arange(0, spec.size, 2, device=device).float() / spec.size
    return _FREQUENCIES[spec.scaling](spec, (spec.theta * stretch) ** exponents, long)


def stages(spec: RopeSpec, device: torch.device) -> list[tuple[int, Tensor]]:
    """First table row and frequencies. Each stage counts positions from 0."""
    found = [(0, frequencies(spec, device))]
    if spec.switch is not None:
        found.append((spec.switch, frequencies(spec, device, long=True)))
    for level in range(1, spec.levels):
        stretch = (2 ** (level + 1) - 1) ** (spec.size / (spec.size - 2))
        found.append((level * spec.max_position, frequencies(spec, device, stretch=stretch)))
    return found


def _default(spec: RopeSpec, wavelengths: Tensor, long: bool) -> Tensor:
    return wavelengths.reciprocal()


def _linear(spec: RopeSpec, wavelengths: Tensor, long: bool) -> Tensor:
    return wavelengths.reciprocal() / float(spec.parameters["factor"])


def _llama3(spec: RopeSpec, wavelengths: Tensor, long: bool) -> Tensor:
    """Stretch long wavelengths, keep short ones, blend others."""
    low, high = float(spec.parameters["low_freq_factor"]), float(spec.parameters["high_freq_factor"])
    frequencies = wavelengths.reciprocal()
    kept = ((spec.original_context / (2 * math.pi * wavelengths) - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / float(spec.parameters["factor"]) + kept * frequencies


def _yarn(spec: RopeSpec, wavelengths: Tensor, long: bool) -> Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071).

    Keeps pairs that rotate often within the original context, stretches pairs that rotate less than once, blends
    others.
    """

    def pair_that_rotates(times: float) -> float:
        return spec.size * math.log(spec.original_context / (times * 2 * math.pi)) / (2 * math.log(spec.theta))

    often, seldom = spec.parameters.get("beta_fast") or 32, spec.parameters.get("beta_slow") or 1
    low, high = pair_that_rotates(often), pair_that_rotates(seldom)
    if spec.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.size - 1)
    pairs = torch.arange(spec.size // 2, device=wavelengths.device).float()
    stretched = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return stretched / (spec.factor * wavelengths) + (1 - stretched) / wavelengths


def _longrope(spec: RopeSpec, wavelengths: Tensor, long: bool) -> Tensor:
    """LongRoPE (https://arxiv.org/abs/2402.13753): factors of pairs, with others beyond the original context."""
    return _divided(wavelengths, spec.parameters["long_factor" if long else "short_factor"])


def _factors(spec: RopeSpec, wavelengths: Tensor, long: bool) -> Tensor:
    """Factors of pairs, from GGUF files."""
    return _divided(wavelengths, spec.parameters["factors"])


def _proportional(spec: RopeSpec, wavelengths: Tensor, long: bool) -> Tensor:
    """The last pairs do not rotate."""
    frequencies = wavelengths.reciprocal() / float(spec.parameters.get("factor", 1.0))
    frequencies[int(spec.parameters["partial_rotary_factor"] * spec.size // 2) :] = 0
    return frequencies


def _divided(wavelengths: Tensor, factors: Sequence[float]) -> Tensor:
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=wavelengths.device) * wavelengths)


_FREQUENCIES: dict[str, Callable[[RopeSpec, Tensor, bool], Tensor]] = {
    "default": _default,
    "prompt_ntk": _default,
    "linear": _linear,
    "llama3": _llama3,
    "dynamic": _default,
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": _factors,
    "proportional": _proportional,
}


class Rope:
    """Float32 ``[rows, size / 2]``, grown on demand.

    A row is a position. Sequences with other frequencies use their stage's rows, which restart at position 0.
    """

    def __init__(
        self,
        frequencies: Tensor,
        *,
        attention_factor: float = 1.0,
        stages: Sequence[tuple[int, Tensor]] = (),
        sections: Sequence[int] = (),
        in_turn: bool = False,
    ) -> None:
        """frequencies: float32 ``[size / 2]``. stages: like `stages`, without the first.

        sections: numbers of frequencies by frame, row and column; consecutive, or interleaved if `in_turn`: every third
        for rows and for columns while they last, others for frames.
        """
        self.frequencies = frequencies
        self._attention_factor = attention_factor
        self._stages = list(stages)
        self.axes = _axes(sections, in_turn=in_turn)
        self._halves = self._compute(FIRST_POSITIONS if frequencies.device.type == "cpu" else CAPTURED_POSITIONS)

    @classmethod
    def of(cls, spec: RopeSpec, device: torch.device) -> Rope:
        (_, first), *others = stages(spec, device)
        return cls(
            first,
            attention_factor=spec.attention_factor,
            stages=others,
            sections=spec.parameters.get("mrope_section", ()),
            in_turn=bool(spec.parameters.get("mrope_interleaved")),
        )

    @property
    def size(self) -> int:
        return 2 * len(self.frequencies)

    def upto(self, length: int) -> tuple[Tensor, Tensor]:
        """At least `length` positions per stage."""
        length += self._stages[-1][0] if self._stages else 0
        known = len(self._halves[0])
        if length > known:
            self._halves = self._compute(max(length, 2 * known))
        return self._halves

    def _compute(self, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=self.frequencies.device).float()
        angles = positions[:, None] * self.frequencies
        for start, frequencies in self._stages:
            angles[start:] = (positions[start:, None] - start) * frequencies
        return angles.cos() * self._attention_factor, angles.sin() * self._attention_factor


def _axes(sections: Sequence[int], *, in_turn: bool) -> list[slice]:
    if not sections:
        return []
    frames, rows, columns = sections
    if in_turn:
        return [slice(1, 3 * rows, 3), slice(2, 3 * columns, 3)]
    return [slice(frames, frames + rows), slice(frames + rows, frames + rows + columns)]


class RopeTables:
    """Each form of a step's rotations is computed on first use."""

    def __init__(self, rope: Rope, positions: Tensor, length: int, dtype: torch.dtype) -> None:
        """positions: table rows, int64 ``[tokens]``, or ``[3, tokens]``: frames, rows and columns of images. length: of
        the longest sequence. dtype: of `signed`."""
        self._rope = rope
        self._positions = positions
        self._length = length
        self._dtype = dtype

    @property
    def size(self) -> int:
        return self._rope.size

    @property
    def sources(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._positions, *self._rope.upto(self._length)

    def afresh(self) -> RopeTables:
        return RopeTables(self._rope, self._positions, self._length, self._dtype)

    @cached_property
    def rows(self) -> RotaryRows:
        """For kernels that look up positions themselves."""
        if self._positions.ndim > 1:
            cos, sin = self._halves()
            return RotaryRows(cos, sin, None)
        return RotaryRows(*self._rope.upto(self._length), self._positions)

    @cached_property
    def signed(self) -> tuple[Tensor, Tensor]:
        """For `apply_rope`, ``[tokens, 1, size]``: cosines twice; negated sines, then sines."""
        cos, sin = self._halves()
        return torch.cat((cos, cos), -1)[:, None].to(self._dtype), torch.cat((-sin, sin), -1)[:, None].to(self._dtype)

    def _halves(self) -> list[Tensor]:
        """Each ``[tokens, size / 2]``."""
        tables = self._rope.upto(self._length)
        if self._positions.ndim == 1:
            return [table[self._positions] for table in tables]
        frames, *others = self._positions
        halves = [table[frames] for table in tables]
        for half, table in zip(halves, tables, strict=True):
            for columns, positions in zip(self._rope.axes, others, strict=True):
                half[:, columns] = table[:, columns][positions]
        return halves


def apply_rope(x: Tensor, tables: RopeTables) -> Tensor:
    """Rotate the first `size` elements of ``[tokens, heads, head_size]``. Element ``i`` pairs with ``i + size / 2``."""
    cos, sin = tables.signed
    plain, kept = x[..., : tables.size], x[..., tables.size :]
    rotated = torch.addcmul(plain * cos, plain.roll(tables.size // 2, -1), sin)
    return torch.cat((rotated, kept), -1) if kept.shape[-1] else rotated
