"""Rotary position embeddings (https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.kernels.attention import RotaryRows

FIRST_POSITIONS = 1024
SCALINGS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How positions turn queries and keys.

    size: elements of a head that turn. theta: the base of the wavelengths. scaling: one of `SCALINGS`.
    factor: by how much scaling stretches the context. The rest is llama3's: wavelengths over ``original_context /
    low_freq_factor`` are stretched, those under ``original_context / high_freq_factor`` are kept, others are blended.
    """

    size: int
    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    @classmethod
    def from_config(cls, size: int, theta: float, scaling: Mapping[str, Any], max_position: int) -> RopeSpec:
        """From ``rope_scaling`` (older checkpoints) or ``rope_parameters`` (transformers 5) of a config.json.

        Raises UnsupportedModelError for a scaling that is not implemented, ModelLoadError for one that is incomplete.
        """
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in SCALINGS:
            raise UnsupportedModelError(f"RoPE scaling {kind!r} is not supported; known are {', '.join(SCALINGS)}")
        if scaling.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError("RoPE over a part of each head (partial_rotary_factor) is not supported")
        theta = scaling.get("rope_theta", theta)
        try:
            if kind == "linear":
                return cls(size, theta, kind, factor=scaling["factor"])
            if kind == "llama3":
                return cls(
                    size,
                    theta,
                    kind,
                    factor=scaling["factor"],
                    low_freq_factor=scaling["low_freq_factor"],
                    high_freq_factor=scaling["high_freq_factor"],
                    original_context=scaling.get("original_max_position_embeddings", max_position),
                )
        except KeyError as error:
            raise ModelLoadError(f"config.json: RoPE scaling {kind!r} lacks {error.args[0]!r}") from error
        return cls(size, theta)

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians a position, float32 ``[size / 2]``."""
        exponents = torch.arange(0, self.size, 2, device=device).float() / self.size
        frequencies = 1.0 / self.theta**exponents
        if self.scaling == "linear":
            return frequencies / self.factor
        if self.scaling == "llama3":
            wavelengths = 2 * math.pi / frequencies
            kept = (self.original_context / wavelengths - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            kept = kept.clamp(0, 1)
            return (1 - kept) * frequencies / self.factor + kept * frequencies
        return frequencies


class Rope:
    """Cosines and sines of all positions so far, float32 ``[positions, size / 2]``, made as they are asked for."""

    def __init__(self, frequencies: Tensor) -> None:
        """frequencies: float32 ``[size / 2]``."""
        self.frequencies = frequencies
        self._halves = self._compute(FIRST_POSITIONS)

    @property
    def size(self) -> int:
        """Elements of a head that turn."""
        return 2 * len(self.frequencies)

    def upto(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of so many positions or more."""
        known = len(self._halves[0])
        if length > known:
            self._halves = self._compute(max(length, 2 * known))
        return self._halves

    def _compute(self, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=self.frequencies.device)
        angles = positions[:, None].float() * self.frequencies
        return angles.cos(), angles.sin()


class RopeTables:
    """A step's positions and what belongs to them, for all layers; each form is made when it is first asked for."""

    def __init__(self, rope: Rope, positions: Tensor, length: int, dtype: torch.dtype) -> None:
        """positions: int64 ``[tokens]``, all below `length`. dtype: of `signed`."""
        self._rope = rope
        self._positions = positions
        self._length = length
        self._dtype = dtype

    @cached_property
    def rows(self) -> RotaryRows:
        """For kernels that look up the positions by themselves."""
        return RotaryRows(*self._rope.upto(self._length), self._positions)

    @cached_property
    def signed(self) -> tuple[Tensor, Tensor]:
        """For `apply_rope`: cosines twice, sines with the sign of each half, ``[tokens, 1, size]``."""
        cos, sin = (half[self._positions] for half in self._rope.upto(self._length))
        return torch.cat((cos, cos), -1)[:, None].to(self._dtype), torch.cat((-sin, sin), -1)[:, None].to(self._dtype)


def apply_rope(x: Tensor, tables: RopeTables) -> Tensor:
    """Turn ``[tokens, heads, size]``; element ``i`` pairs with ``i + size / 2``, as in Hugging Face checkpoints."""
    cos, sin = tables.signed
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
