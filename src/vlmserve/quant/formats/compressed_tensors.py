"""Low-bit weights of compressed-tensors (https://github.com/vllm-project/compressed-tensors).

Tensors of a layer ``X`` in the format "pack-quantized":

- ``X.weight_packed``: unsigned values in int32 words, lowest bits first
- ``X.weight_scale``: ``[out_features, groups]``
- ``X.weight_shape``
- ``X.weight_zero_point``: packed along the outputs; absent: the middle of the range
- ``X.weight_g_idx``: the group of each input; absent: contiguous groups

A weight is ``scale * (value - zero point)``. Zero points of asymmetric weights are rarely integers, so vlmserve stores
``X.weight_minimum`` ``[out_features, groups]`` instead: ``scale * value + minimum``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlmserve.errors import ModelLoadError
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.quant.formats import scaled
from vlmserve.quant.formats.layout import Layout, StoredWeight, check_setting, grouped, pack, unpack

METHOD, OWN_METHOD = "compressed-tensors", "vlmserve"
FORMAT, BYTES = "pack-quantized", "int-quantized"
NUMBERS = {
    FORMAT: ["int"],
    BYTES: ["int"],
    "float-quantized": ["float"],
    "naive-quantized": ["int", "float"],
}
"""The implemented formats and the kinds of numbers in them."""
PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
ZERO_POINT, MINIMUM, GROUP_OF = "weight_zero_point", "weight_minimum", "weight_g_idx"


def to_tensors(weight: QuantizedWeight, *, symmetric: bool, zero_points: bool = False) -> dict[str, Tensor]:
    """symmetric: zero is mid-range. zero_points: zero is one of a weight's values."""
    # 4-bit scales and minimums are already bfloat16 numbers.
    scales = weight.scales.bfloat16() if weight.bits == 4 else weight.scales
    tensors = {PACKED: pack(weight.values, weight.bits), SCALE: scales, SHAPE: torch.tensor(weight.shape)}
    if zero_points and not symmetric:
        zeros = (-weight.minimums / weight.scales).round().to(torch.uint8)
        tensors[ZERO_POINT] = pack(zeros.T, weight.bits).T.contiguous()
    elif not symmetric:
        tensors[MINIMUM] = weight.minimums.bfloat16() if weight.bits == 4 else weight.minimums
    return tensors


def to_bytes(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Format "int-quantized". The weight must be symmetric 8-bit."""
    return {scaled.WEIGHT: (weight.values.to(torch.int16) - 128).to(torch.int8), SCALE: weight.scales}


def from_tensors(
    tensors: Mapping[str, Tensor], group_sizes: Sequence[int], asymmetric: Collection[int] = ()
) -> StoredWeight:
    """asymmetric: widths that may have zero points. Raises ModelLoadError for mismatched tensors."""
    packed, scales = tensors[PACKED], tensors[SCALE].float()
    out_features, in_features = tensors[SHAPE].tolist()
    widths = {-(-in_features // (32 // bits)): bits for bits in (8, 4)}
    bits = widths.get(packed.shape[1])
    if bits is None or len(packed) != out_features:
        raise ModelLoadError(
            f"packed weights {tuple(packed.shape)} do not make a weight of {out_features} x {in_features}"
        )
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(out_features, 1).contiguous()
    values, middle = unpack(packed, bits, in_features), 2 ** (bits - 1)
    if (minimums := tensors.get(MINIMUM)) is not None:
        symmetric = grouped(bits, values, scales, torch.zeros_like(scales), group_sizes, None)
        assert isinstance(symmetric, QuantizedWeight)
        return QuantizedWeight(bits, symmetric.group_size, values, scales, minimums.float())
    if ZERO_POINT not in tensors and bits in asymmetric:
        raise ModelLoadError(
            f"config.json says that {bits}-bit weights are asymmetric, but {ZERO_POINT} and {MINIMUM} are missing; "
            "quantize the original checkpoint again"
        )
    if ZERO_POINT not in tensors:
        zeros = torch.full_like(scales, middle)
    elif tensors[ZERO_POINT].dtype == torch.int32:
        zeros = unpack(tensors[ZERO_POINT].T, bits, out_features).T.float()
    else:  # the library's first releases did not pack them
        zeros = tensors[ZERO_POINT].float() + middle
    return grouped(bits, values, scales, zeros, group_sizes, tensors.get(GROUP_OF))


def describe(
    targets: Mapping[int, Sequence[str]],
    ignore: Sequence[str],
    *,
    group_size: int,
    symmetric: bool,
    zero_points: bool = False,
    rounds_inputs: bool = False,
) -> Any:
    """targets: names of layers or kinds. rounds_inputs: to int8 with a scale per token."""
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "group_size": None, "dynamic": True}
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
            "input_activations": inputs if rounds_inputs else None,
            "output_activations": None,
        }
        for number, (bits, names) in enumerate(targets.items())
    }
    return {
        "quant_method": METHOD if symmetric or zero_points or 4 not in targets else OWN_METHOD,
        "format": BYTES if rounds_inputs else FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
    }


def layouts(config: Mapping[str, Any]) -> list[Layout]:
    check_setting(METHOD, "transform_config", config.get("transform_config") or None, [None])
    sparsity = (config.get("sparsity_config") or {}).get("format") or "dense"
    check_setting(METHOD, "sparsity_config", sparsity, ["dense"])
    sizes: list[int] = []
    symmetries: dict[int, set[bool]] = {}
    blocks = set()
    rounds_inputs = []
    for group in config.get("config_groups", {}).values():
        weights = group["weights"]
        if not weights:
            continue
        kind = str(group.get("format") or config.get("format"))
        check_setting(METHOD, "format", kind, list(NUMBERS))
        number = weights.get("type", "int")
        check_setting(METHOD, f"weights' type in format {kind}", number, NUMBERS[kind])
        check_setting(METHOD, "num_bits", weights.get("num_bits"), [4, 8] if number == "int" else [8])
        check_setting(METHOD, "strategy", weights.get("strategy"), ["tensor", "channel", "group", "block"])
        check_setting(METHOD, "actorder", weights.get("actorder"), [None, "weight", "static", "group"])
        symmetries.setdefault(weights["num_bits"], set()).add(weights.get("symmetric", True))
        inputs = group.get("input_activations") or {}
        rounds_inputs.append(
            inputs.get("num_bits") == 8 and inputs.get("type", "int") == "int" and bool(inputs.get("dynamic"))
        )
        if weights.get("group_size"):
            sizes.append(int(weights["group_size"]))
        blocks.add(tuple(weights.get("block_structure") or ()) if weights["strategy"] == "block" else None)
    check_setting(METHOD, "a number of block structures of", len(blocks - {None}), [0, 1])
    packed = Layout(
        PACKED,
        (SCALE, SHAPE),
        (MINIMUM, ZERO_POINT, GROUP_OF),
        partial(
            from_tensors, group_sizes=tuple(sizes), asymmetric={n for n, own in symmetries.items() if not any(own)}
        ),
    )
    block = next(iter(blocks - {None}), None)
    in_bytes = partial(_in_bytes, block=block, stated=tuple(sizes), rounds_inputs=all(rounds_inputs))
    return [packed, Layout(scaled.WEIGHT, (SCALE,), (ZERO_POINT,), in_bytes)]


def _in_bytes(
    tensors: Mapping[str, Tensor], block: tuple[int, ...] | None, stated: tuple[int, ...], *, rounds_inputs: bool
) -> StoredWeight:
    """block: outputs and inputs that share a scale."""
    weight, scales = tensors[scaled.WEIGHT], tensors[SCALE]
    in_blocks = block is not None and scales.shape == tuple(
        -(-size // each) for size, each in zip(weight.shape, block, strict=True)
    )
    read = scaled.from_tensors(tensors, block=block if in_blocks else None, stated=stated)
    return dataclasses.replace(read, input_bits=8) if rounds_inputs and isinstance(read, QuantizedWeight) else read
