"""The residual stream of a transformer.

Devices may fuse a norm with the preceding sum or leave it to the next linear (`DeferredNorm`), so an added block stays
unfinished until the next read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, overload

import torch
from torch import Tensor

from vlmserve.kernels.operations import DeferringLinearKernel, Inputs, Normed, RoundedRows, Rounding, RoundingNorm
from vlmserve.layers.linear import Linear
from vlmserve.layers.norm import Normalization


class Last(Protocol):
    """A block's last layer; adds its result to rows."""

    @property
    def deferring(self) -> DeferringLinearKernel | None: ...

    def __call__(self, x: Inputs, residual: Tensor | None = None) -> Tensor: ...


class Unfinished(NamedTuple):
    linear: Last
    inputs: Inputs


class Adding:
    """A last layer that is no `Linear`."""

    deferring = None

    def __init__(self, add: Callable[[Tensor, Tensor | None], Tensor]) -> None:
        self._add = add

    def __call__(self, x: Inputs, residual: Tensor | None = None) -> Tensor:
        assert not isinstance(x, RoundedRows)
        return self._add(x, residual)


class ResidualStream:
    """Rows ``[..., size]`` that blocks read and add to."""

    __slots__ = ("_added", "_normed", "_post_norm", "_rows")

    def __init__(self, rows: Tensor, normed: Tensor | None = None, *, post_norm: bool = False) -> None:
        """normed: the next norm, if known. post_norm: norms apply to sums instead of blocks' outputs."""
        self._rows = rows
        self._normed: Normed | None = normed
        self._post_norm = post_norm
        self._added: tuple[Unfinished, Normalization | None, float | Tensor | None] | None = None

    @classmethod
    def joined(cls, parts: Sequence[ResidualStream]) -> ResidualStream:
        if len(parts) == 1:
            return parts[0]
        normed = [part._normed for part in parts if isinstance(part._normed, Tensor)]
        return cls(torch.cat([part.rows for part in parts]), torch.cat(normed) if normed else None)

    @property
    def rows(self) -> Tensor:
        if self._added is not None:
            self.finish()
        return self._rows

    @property
    def known(self) -> Tensor | None:
        """The next norm, if the last sum computed it."""
        return self._normed if isinstance(self._normed, Tensor) else None

    def add(self, block: Unfinished, norm: Normalization | None = None, factor: float | Tensor | None = None) -> None:
        if self._added is not None:
            self.finish()
        self._added, self._normed = (block, norm, factor), None

    @overload
    def normed(self, norm: Normalization | None, reader: None = None) -> Tensor: ...
    @overload
    def normed(self, norm: Normalization | None, reader: Linear | None) -> Normed: ...
    def normed(self, norm: Normalization | None, reader: Linear | None = None) -> Normed:
        """Without a norm, return the rows. reader: the only reader, which may compute the norm; None: several."""
        if self._added is not None:
            self.finish(norm, reader)
        normed, self._normed = self._normed, None
        if normed is not None:
            return normed
        if (fused := _rounding(norm, reader, self._rows)) is not None:
            kernel, rounding = fused
            return kernel.rounded(self._rows, rounding)
        return self._rows if norm is None else norm(self._rows)

    def finish(self, norm: Normalization | None = None, reader: Linear | None = None) -> None:
        """norm: the following one, computed if the device fuses both."""
        assert self._added is not None
        (linear, inputs), output_norm, factor = self._added
        self._added, rows = None, self._rows
        if isinstance(factor, Tensor):
            self._rows = torch.addcmul(rows, factor, linear(inputs))
            return
        if factor is not None:
            self._rows = torch.add(rows, linear(inputs), alpha=factor)
            return
        if self._post_norm and output_norm is not None:
            self._rows = output_norm(linear(inputs, rows))
            return
        if norm is not None and norm.kernel is not None and output_norm is None and reader is not None:
            first, second = linear.deferring, reader.deferring
            if first is not None and second is not None and second.completes(len(rows)) and isinstance(inputs, Tensor):
                deferred = first.deferring(inputs, rows, norm.kernel)
                if deferred is not None:
                    self._rows, self._normed = deferred.rows, deferred
                    return
        summing = None if norm is None else norm.summing
        before = None if output_norm is None else output_norm.summing
        if summing is not None and (output_norm is None or before is not None):
            if (fused := _rounding(norm, reader, rows)) is None:
                self._rows, self._normed = summing.of_sum(linear(inputs), rows, before)
            else:
                kernel, rounding = fused
                self._rows, self._normed = kernel.rounded_sum(linear(inputs), rows, before, rounding)
        elif output_norm is None:
            self._rows = linear(inputs, rows)
        elif output_norm.adding is not None:
            self._rows = output_norm.adding.plus(linear(inputs), rows)
        else:
            self._rows = rows + output_norm(linear(inputs))

    def scale(self, factor: Tensor) -> None:
        self._rows, self._normed = self.rows * factor, None

    def narrow(self, wanted: Tensor) -> None:
        """Keep only these rows, int64, in added blocks, too."""
        rows = self._rows[wanted]
        self._rows, self._normed = rows, None
        if self._added is not None:
            (linear, inputs), norm, factor = self._added
            assert isinstance(inputs, Tensor), "rows of a block that reads all rows are not rounded"
            self._added = (Unfinished(linear, inputs[wanted]), norm, factor) if len(wanted) else None


def _rounding(norm: Normalization | None, reader: Linear | None, rows: Tensor) -> tuple[RoundingNorm, Rounding] | None:
    """None: the reader takes plain rows."""
    if norm is None or norm.rounding is None or reader is None or rows.ndim != 2:
        return None
    rounding = reader.rounding(len(rows))
    return None if rounding is None else (norm.rounding, rounding)
