"""Weights of few bits as checkpoints hold them: the "pack-quantized" format of compressed-tensors.

Of a layer ``X`` there are ``X.weight_packed``, unsigned values in the bits of int32 words, the first one lowest;
``X.weight_scale`` ``[out_features, groups]``; ``X.weight_shape``; and, unless the middle of the range stands for zero,
``X.weight_zero_point``, packed along the outputs. A weight is ``scale * (value - zero point)``.

A zero point is a whole number, which a range from the least weight of a group to its largest does not have in general.
For such weights there is a format of our own, which differs in one thing: instead of zero points it has
``X.weight_shift`` ``[out_features, groups]``, and a weight is ``scale * value + shift``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.kernels.quantized import QuantizedWeight

METHOD, OWN_METHOD = "compressed-tensors", "vlmserve"
FORMAT = "pack-quantized"
PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
ZERO_POINT, SHIFT = "weight_zero_point", "weight_shift"


def pack(values: Tensor, bits: int) -> Tensor:
    """uint8 ``[rows, columns]`` of 4 or 8 bits each to int32 ``[rows, words]``."""
    octets = F.pad(values, (0, -values.shape[1] % (32 // bits)))
    if bits == 4:
        octets = octets[:, ::2] | (octets[:, 1::2] << 4)
    return octets.contiguous().view(torch.int32)


def unpack(words: Tensor, bits: int, columns: int) -> Tensor:
    """What `pack` made of uint8 ``[rows, columns]``."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 4:
        octets = torch.stack((octets & 15, octets >> 4), -1).flatten(1)
    return octets[:, :columns].contiguous()


def to_tensors(weight: QuantizedWeight, *, symmetric: bool) -> dict[str, Tensor]:
    """A weight as the tensors that a checkpoint holds of it; symmetric: the middle of the range stands for zero."""
    # Scales and shifts of 4 bits are bfloat16 numbers already.
    scales = weight.scales.bfloat16() if weight.bits == 4 else weight.scales
    tensors = {PACKED: pack(weight.values, weight.bits), SCALE: scales, SHAPE: torch.tensor(weight.shape)}
    if not symmetric:
        tensors[SHIFT] = weight.shifts.bfloat16() if weight.bits == 4 else weight.shifts
    return tensors


def from_tensors(tensors: Mapping[str, Tensor], group_sizes: Sequence[int]) -> QuantizedWeight:
    """The weight of which a checkpoint holds these tensors; group_sizes: those that there are.

    Raises ModelLoadError where the tensors do not belong together.
    """
    packed, scales = tensors[PACKED], tensors[SCALE].float()
    out_features, in_features = tensors[SHAPE].tolist()
    widths = {-(-in_features // (32 // bits)): bits for bits in (8, 4)}
    bits = widths.get(packed.shape[1])
    sizes = [size for size in (in_features, *group_sizes) if -(-in_features // size) == scales.shape[1]]
    if bits is None or not sizes or len({out_features, len(packed), len(scales)}) > 1:
        raise ModelLoadError(
            f"packed weights {tuple(packed.shape)} and scales {tuple(scales.shape)} do not make a weight of "
            f"{out_features} x {in_features}"
        )
    values = unpack(packed, bits, in_features)
    if SHIFT in tensors:
        shifts = tensors[SHIFT].float()
    elif ZERO_POINT in tensors:
        shifts = unpack(tensors[ZERO_POINT].T, bits, out_features).T * -scales
    else:
        shifts = -(2 ** (bits - 1)) * scales
    return QuantizedWeight(bits, sizes[0], values, scales, shifts)


def describe(targets: Mapping[int, Sequence[str]], ignore: Sequence[str], *, group_size: int, symmetric: bool) -> Any:
    """The ``quantization_config`` of a config.json. targets: names of layers, or of their kind, by bits."""
    groups = {
        f"group_{number}": {
            "targets": list(names),
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": symmetric or bits == 8,
                "strategy": "channel" if bits == 8 else "group",
                "group_size": None if bits == 8 else group_size,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
        for number, (bits, names) in enumerate(targets.items())
    }
    return {
        "quant_method": METHOD if symmetric or 4 not in targets else OWN_METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
    }


def read_group_sizes(config: Mapping[str, Any]) -> list[int]:
    """The group sizes in a ``quantization_config``. Raises UnsupportedModelError for what cannot be loaded."""
    method = config.get("quant_method")
    if method not in (METHOD, OWN_METHOD):
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {method!r}, which is not supported ({METHOD!r} is); load the original one"
        )
    sizes = []
    for group in config.get("config_groups", {}).values():
        weights = group["weights"] or {}
        wanted: dict[str, tuple[Any, list[Any]]] = {
            "format": (group.get("format") or config.get("format"), [FORMAT]),
            "weights' type": (weights.get("type"), ["int"]),
            "num_bits": (weights.get("num_bits"), [4, 8]),
            "strategy": (weights.get("strategy"), ["channel", "group"]),
            "actorder": (weights.get("actorder"), [None, "weight", "static"]),
            "input_activations": (group.get("input_activations"), [None]),
        }
        for name, (value, known) in wanted.items():
            if value not in known:
                choices = ", ".join(map(str, known))
                raise UnsupportedModelError(f"quantized checkpoints with {name} {value!r} are not supported: {choices}")
        if weights.get("group_size"):
            sizes.append(int(weights["group_size"]))
    return sizes
