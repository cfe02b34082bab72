"""Read low-bit weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.kernels.quantized import QuantizedWeight

StoredWeight = QuantizedWeight | Tensor
"""A weight ``[out_features, in_features]``: low-bit, or float32 if `QuantizedWeight` cannot represent it."""


@dataclass(frozen=True, slots=True)
class Layout:
    mark: str
    """``X.mark`` identifies the layout. It holds the values, unless ``X.weight`` does."""
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    """Names of tensors that may be missing."""
    read: Callable[[Mapping[str, Tensor]], StoredWeight]
    """Makes a weight from the tensors by name. Raises ModelLoadError for mismatched tensors, UnsupportedModelError for
    an unsupported kind.
    """


def check_setting(method: str, name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        choices = ", ".join(map(str, known))
        raise UnsupportedModelError(
            f"checkpoints quantized by {method!r} with {name} {value!r} are not supported; supported: {choices}; "
            "load the unquantized model with --quantize int4"
        )


def pack(values: Tensor, bits: int) -> Tensor:
    """uint8 ``[rows, columns]`` to int32 ``[rows, words]``, lowest bits first."""
    octets = F.pad(values, (0, -values.shape[1] % (32 // bits)))
    if bits == 4:
        octets = octets[:, ::2] | (octets[:, 1::2] << 4)
    return octets.contiguous().view(torch.int32)


def unpack(words: Tensor, bits: int, columns: int) -> Tensor:
    octets = words.contiguous().view(torch.uint8)
    if bits == 4:
        octets = torch.stack((octets & 15, octets >> 4), -1).flatten(1)
    return octets[:, :columns].contiguous()


def find_group_size(in_features: int, groups: int, stated: Sequence[int]) -> int | None:
    return next((size for size in (in_features, *stated) if size > 0 and -(-in_features // size) == groups), None)


def grouped(
    bits: int, values: Tensor, scales: Tensor, zeros: Tensor, stated: Sequence[int], group_of: Tensor | None
) -> StoredWeight:
    """Make a weight ``scale * (value - zero)``; sort columns of non-contiguous groups.

    values: uint8 ``[out_features, in_features]``. scales, zeros: float32 ``[out_features, groups]``. stated: allowed
    group sizes. group_of: of each input; None: contiguous. Raises ModelLoadError for mismatched shapes.
    """
    in_features, groups = values.shape[1], scales.shape[1]
    size = find_group_size(in_features, groups, stated)
    if scales.shape != zeros.shape or len(scales) != len(values) or (size is None and group_of is None):
        raise ModelLoadError(
            f"weights {tuple(values.shape)} do not fit scales {tuple(scales.shape)} and zero points "
            f"{tuple(zeros.shape)} in groups of {', '.join(map(str, stated)) or 'all'}"
        )
    if group_of is not None and not _side_by_side(group_of, size):
        if len(group_of) != in_features or bool(((group_of < 0) | (group_of >= groups)).any()):
            raise ModelLoadError(f"groups of {len(group_of)} inputs do not fit {in_features} inputs in {groups} groups")
        order = group_of.argsort(stable=True)
        if _side_by_side(group_of[order], size):
            assert size is not None
            return QuantizedWeight(bits, size, values[:, order], scales, -zeros * scales, order=order)
        column_of = group_of.long()
        return scales[:, column_of] * (values.float() - zeros[:, column_of])
    assert size is not None
    return QuantizedWeight(bits, size, values, scales, -zeros * scales)


def _side_by_side(group_of: Tensor, size: int | None) -> bool:
    return size is not None and torch.equal(
        group_of.long(), torch.arange(len(group_of), device=group_of.device) // size
    )
