"""Zero padding, for devices that run faster if rows begin at multiples of 16 bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.adapters import Change


@dataclass(frozen=True, slots=True)
class Padding:
    """Pads a weight ``[out_features, in_features]``."""

    inputs: int
    outputs: int
    places: Tensor
    """int64 ``[out_features]``, the new index of each output."""

    @classmethod
    def of(cls, shape: torch.Size, inputs: int, parts: int, width: int) -> Padding | None:
        """Return None if no padding is needed.

        inputs: number with padding. parts: equal parts of the outputs, each padded to `width`.
        """
        out_features, in_features = shape
        if (inputs, parts * width) == (in_features, out_features):
            return None
        places = torch.arange(out_features).view(parts, -1) + torch.arange(parts)[:, None] * (
            width - out_features // parts
        )
        return cls(inputs, parts * width, places.flatten())

    def fit(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., inputs]``. Padded input passes."""
        missing = self.inputs - x.shape[-1]
        return F.pad(x, (0, missing)) if missing else x

    def of_outputs(self, values: Tensor) -> Tensor:
        """``[out_features, ...]`` to ``[outputs, ...]``."""
        padded = values.new_zeros(self.outputs, *values.shape[1:])
        padded[self.places.to(values.device)] = values
        return padded

    def of_weight(self, weight: Tensor) -> Tensor:
        return self.of_outputs(self.fit(weight))

    def of_change(self, change: Change) -> Change:
        parts = []
        for part in change.parts:
            places = self.places[part.start : part.start + len(part.up)]
            start, end = int(places[0]), int(places[-1]) + 1
            up = part.up.new_zeros(end - start, part.up.shape[1])
            up[(places - start).to(up.device)] = part.up
            parts.append(part._replace(down=self.fit(part.down), up=up, start=start))
        factor, shift, bias = (
            None if values is None else self.of_outputs(values) for values in (change.factor, change.shift, change.bias)
        )
        weight = None if change.weight is None else self.of_weight(change.weight)
        outputs = change.outputs
        if outputs is not None:
            indices, rows = outputs
            outputs = self.places.to(indices.device)[indices], self.fit(rows)
        return replace(
            change, parts=tuple(parts), factor=factor, shift=shift, weight=weight, bias=bias, outputs=outputs
        )
