"""4-bit and 8-bit weights of bitsandbytes (https://github.com/bitsandbytes-foundation/bitsandbytes).

Tensors of a 4-bit layer ``X`` (https://arxiv.org/abs/2305.14314):

- ``X.weight``: two map indices in a byte, high bits first; dtype ``bnb_4bit_quant_storage``.
- ``X.weight.quant_map``: 16 numbers.
- ``X.weight.absmax``: a factor for each block; blocks may cross rows.
- ``X.weight.quant_state.bitsandbytes__nf4`` or ``..._fp4``: shape and block size, JSON as bytes.

With double quantization, factors are ``nested_quant_map[absmax] * nested_absmax + nested_offset``; `nested_absmax` has
its own blocks.

An 8-bit layer (https://arxiv.org/abs/2208.07339) has int8 ``X.weight`` and ``X.SCB``, the magnitude of 127 by output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.errors import MissingWeightsError, ModelLoadError
from vlmserve.quant.formats import scaled
from vlmserve.quant.formats.layout import Layout, StoredWeight, check_setting

METHOD = "bitsandbytes"
FLAGS = ("load_in_4bit", "load_in_8bit")
TYPES = ("nf4", "fp4")
WEIGHT, ABSMAX, MAP, STATE = scaled.WEIGHT, "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__"
NESTED = NESTED_ABSMAX, NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"
SCALE, ORDER = "SCB", "weight_format"
LARGEST = 127
"""The 8-bit value of an output's largest magnitude."""


def layouts(config: Mapping[str, Any]) -> list[Layout]:
    flags = [flag for flag in FLAGS if config.get(flag, config.get(f"_{flag}"))]
    check_setting(METHOD, "flags", " and ".join(flags) or "none", FLAGS)
    if "load_in_8bit" in flags:
        return [Layout(WEIGHT, (SCALE,), (ORDER,), _in_bytes)]
    stated = config.get("bnb_4bit_quant_type") or "fp4"
    check_setting(METHOD, "bnb_4bit_quant_type", stated, TYPES)
    by_state = [Layout(STATE + kind, (WEIGHT, ABSMAX, MAP), NESTED, _from_table) for kind in TYPES]
    # For layers without a state.
    return [*by_state, Layout(WEIGHT, (ABSMAX, MAP, STATE + stated), NESTED, _from_table)]


def _in_bytes(tensors: Mapping[str, Tensor]) -> StoredWeight:
    # Some GPUs store other orders.
    check_setting(METHOD, ORDER, int(tensors.get(ORDER, torch.tensor(0))), [0])
    weight, largest = tensors[WEIGHT], tensors[SCALE]
    if weight.ndim != 2 or largest.numel() != len(weight):
        raise ModelLoadError(f"SCB {tuple(largest.shape)} does not fit a weight {tuple(weight.shape)}")
    return scaled.from_tensors({WEIGHT: weight, SCALE: largest.flatten().float() / LARGEST}, scale=SCALE)


def _from_table(tensors: Mapping[str, Tensor]) -> Tensor:
    """Dequantize to float32: `QuantizedWeight` needs evenly spaced values."""
    state = _State(next(tensor for name, tensor in tensors.items() if name.startswith(STATE)))
    state.choice("quant_type", TYPES)
    shape, size = state.shape(), state.size("blocksize")
    factors = tensors[ABSMAX].flatten()
    if factors.dtype == torch.uint8:
        factors = _nested(tensors, factors, state)
    table = _table(MAP, tensors[MAP], 16)
    octets = tensors[WEIGHT].contiguous().view(torch.uint8).flatten()
    count = math.prod(shape)
    if len(octets) != -(-count // 2):
        raise ModelLoadError(f"a weight of {shape[0]} x {shape[1]} needs {-(-count // 2)} bytes, not {len(octets)}")
    # Two values at a time need half the indices.
    pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), 1)
    return _multiplied(pairs, octets, factors.float(), size)[:count].view(shape)


def _nested(tensors: Mapping[str, Tensor], values: Tensor, state: _State) -> Tensor:
    if lacking := [name for name in NESTED if name not in tensors]:
        raise MissingWeightsError(f"absmax is in 8 bits, but {' and '.join(lacking)} are missing")
    table = _table(NESTED_MAP, tensors[NESTED_MAP], 256)[:, None]
    own = tensors[NESTED_ABSMAX].flatten().float()
    factors = _multiplied(table, values, own, state.size("nested_blocksize"))[: len(values)]
    return factors + state.number("nested_offset")


def _table(name: str, numbers: Tensor, count: int) -> Tensor:
    if numbers.numel() != count:
        raise ModelLoadError(f"{name} has {numbers.numel()} numbers, not {count}")
    return numbers.flatten().float()


def _multiplied(rows: Tensor, values: Tensor, factors: Tensor, size: int) -> Tensor:
    """Multiply each block of `size` numbers by its factor.

    rows: numbers of each value, ``[256, numbers]``. values: uint8 ``[n]``. Raises ModelLoadError for a wrong number of
    blocks.
    """
    width = rows.shape[1]
    if len(factors) != -(-len(values) * width // size) or size % width:
        raise ModelLoadError(f"{len(values) * width} values in blocks of {size} do not fit {len(factors)} factors")
    filled = F.pad(values, (0, len(factors) * (size // width) - len(values)))
    return F.embedding(filled.int(), rows).view(-1, size).mul_(factors[:, None]).flatten()


class _State:
    """JSON in a tensor's bytes. Raises ModelLoadError for other content."""

    def __init__(self, octets: Tensor) -> None:
        try:
            content = json.loads(bytes(octets.flatten().tolist()))
        except (ValueError, TypeError) as error:
            raise ModelLoadError(f"quant_state is broken or truncated: {error}") from error
        self._content: dict[str, Any] = content if isinstance(content, dict) else {}

    def choice(self, key: str, known: tuple[str, ...]) -> None:
        check_setting(METHOD, key, self._content.get(key), known)

    def shape(self) -> tuple[int, int]:
        shape = self._content.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
            raise ModelLoadError(f"quant_state: shape is {shape!r:.100}, not outputs and inputs")
        return shape[0], shape[1]

    def size(self, key: str) -> int:
        size = self._content.get(key)
        if type(size) is not int or size < 1:
            raise ModelLoadError(f"quant_state: {key} is {size!r:.100}, not a number of values")
        return size

    def number(self, key: str) -> float:
        number = self._content.get(key)
        if not isinstance(number, int | float):
            raise ModelLoadError(f"quant_state: {key} is {number!r:.100}, not a number")
        return float(number)
