"""The record of one operation of a CPU program. Mirrors `Operation` in csrc/table.h."""

from __future__ import annotations

import ctypes
from itertools import zip_longest
from types import ModuleType
from typing import Any

KINDS = ("NORM", "LINEAR", "ATTENTION", "DELTA", "CONVOLUTION", "GATE", "MULTIPLY", "EXPERTS")
NORM, LINEAR, ATTENTION, DELTA, CONVOLUTION, GATE, MULTIPLY, EXPERTS = range(len(KINDS))
_FIELDS = """kind source target residual weight bias in_features out_features first groups weight_stride centered
    activation gated weight_bits group minimums input_bits eps keys values scales heads kv_heads head_size block_size
    rope_size window scale soft_cap rope column is_sharing is_causal plan adapters convolution decay dt_bias states tail
    drafts value_size kernel experts"""
_FLOATS = {"eps", "scale", "soft_cap"}


class Operation(ctypes.Structure):
    """Operands are value numbers, then buffer numbers after assignment."""

    __slots__ = ()
    _fields_ = tuple((name, ctypes.c_double if name in _FLOATS else ctypes.c_int64) for name in _FIELDS.split())

    def __init__(
        self, kind: int, source: int, target: int, residual: int = -1, *, rope: int = -1, **fields: Any
    ) -> None:
        """Raises AttributeError for an unknown name."""
        super().__init__(kind=kind, source=source, target=target, residual=residual, rope=rope, **fields)


def mismatch(native: ModuleType, record: type[ctypes.Structure] = Operation) -> str | None:
    """Return the first field or kind that differs in the compiled kernels."""
    ours = [
        (name, getattr(record, name).offset, getattr(record, name).size, kind is ctypes.c_double)
        for name, kind, *_ in record._fields_
    ]
    compiled = zip_longest(getattr(native, "operation_fields", tuple)(), ours)
    kinds = ((getattr(native, name, None), value) for value, name in enumerate(KINDS))
    different = next((pair for pair in (*compiled, *kinds) if pair[0] != pair[1]), None)
    return None if different is None else f"Operation has {different[0]} in C++ and {different[1]} in Python"
