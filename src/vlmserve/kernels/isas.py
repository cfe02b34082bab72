"""Instruction sets of the native kernels, and GGUF types that they read. Imports no torch."""

from __future__ import annotations

import importlib
from typing import NamedTuple

SUPERBLOCK_ISAS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2")
"""Instruction sets with measured faster superblock kernels. Others run a trial."""
SUPERBLOCK = 256
"""Weights in one superblock of a GGUF K-quant or IQ4_XS."""
SUPERBLOCK_BYTES = {10: 84, 11: 110, 12: 144, 13: 176, 14: 210, 23: 136}
"""Bytes of a superblock, by GGUF type number (Q2_K to Q6_K, IQ4_XS)."""

GROUP = 32
"""Weights in one block of the other GGUF types."""


class GroupBlocks(NamedTuple):
    """A GGUF type with blocks of `GROUP` weights and a scale."""

    num_bytes: int
    bits: int
    minimums: bool = False
    is_coded: bool = False


GROUP_BLOCKS = {
    2: GroupBlocks(18, bits=4),
    3: GroupBlocks(20, bits=4, minimums=True),
    6: GroupBlocks(22, bits=8),
    7: GroupBlocks(24, bits=8, minimums=True),
    8: GroupBlocks(34, bits=8),
    20: GroupBlocks(18, bits=4, is_coded=True),
}
"""By GGUF type number: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL."""


def keeps_superblocks(kernels: str) -> bool:
    try:
        native = importlib.import_module("vlmserve.kernels._native")
    except ImportError:
        return False
    return (native.selected_isa() if kernels in ("auto", "native") else kernels) in SUPERBLOCK_ISAS
