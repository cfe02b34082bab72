"""What instruction sets of the native kernels do, without torch."""

from __future__ import annotations

import importlib

SUPERBLOCK_ISAS = ("avx2",)
"""Instruction sets whose kernels for GGUF's superblocks were measured to be faster. Others have a trial."""
SUPERBLOCK = 256
"""Weights of an output in one superblock of a GGUF K-quant or IQ4_XS."""
SUPERBLOCK_BYTES = {10: 84, 11: 110, 12: 144, 13: 176, 14: 210, 23: 136}
"""Bytes of `SUPERBLOCK` weights, by GGUF's numbers of the types Q2_K to Q6_K and IQ4_XS."""


def keeps_superblocks(kernels: str) -> bool:
    """Return whether kernels certainly keep superblocks, without a trial. kernels: as in `EngineConfig`."""
    try:
        native = importlib.import_module("vlmserve.kernels._native")
    except ImportError:
        return False
    return (native.selected_isa() if kernels in ("auto", "native") else kernels) in SUPERBLOCK_ISAS
