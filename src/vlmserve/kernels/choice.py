"""Chooses native kernels for an instruction set, or torch."""

from __future__ import annotations

import logging
import os
from functools import cache

import torch

from vlmserve.errors import ConfigurationError
from vlmserve.kernels.extension import (
    COMPILE_HERE,
    DTYPES,
    extension,
    lacks_best_isa,
    missing_isas,
    supported_isas,
)
from vlmserve.kernels.trials import is_as_fast_as_torch

logger = logging.getLogger(__name__)

VARIABLE = "VLMSERVE_KERNELS"
CHOICES = ("auto", "torch", "native")
MEASURED = frozenset(("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2"))
"""Instruction sets whose kernels were measured to be at least as fast as torch (docs/performance.md)."""


def check_kernels(choice: str) -> str:
    """Return "auto", "torch", "native" or one of `supported_isas`.

    "auto" reads ``VLMSERVE_KERNELS``. Raises ConfigurationError for kernels that this machine lacks.
    """
    if choice == "auto":
        choice = os.environ.get(VARIABLE) or "auto"
    isas = supported_isas()
    if choice in missing_isas():
        raise ConfigurationError(f"--kernels {choice}: not compiled; {COMPILE_HERE}")
    if choice not in (*CHOICES, *isas):
        known = ", ".join((*CHOICES, *isas))
        raise ConfigurationError(f"--kernels {choice}: not available on this machine; choose one of {known}")
    if choice == "native" and not isas:
        raise ConfigurationError("the native kernels were not built: install vlmserve where there is a C++ compiler")
    return choice


def choose_kernels(choice: str, dtype: torch.dtype) -> str | None:
    """Return an instruction set, or None for torch. Raises ConfigurationError.

    choice: see `check_kernels`; "auto" takes the best instruction set that is not slower than torch.
    """
    choice = check_kernels(choice)
    isas = supported_isas()
    if choice == "torch" or dtype not in DTYPES:
        return None
    if not isas:
        logger.info("kernels: torch (native ones were not built, or for another version)")
        return None
    if choice != isas[0] and lacks_best_isa():
        logger.warning("kernels: %s, this processor's best, are not compiled; %s", missing_isas()[0], COMPILE_HERE)
    for isa in (choice,) if choice in isas else isas:
        extension().select_isa(isa)
        if choice != "auto" or isa in MEASURED or is_as_fast_as_torch(isa, dtype):
            logger.info("kernels: native, %s", isa)
            return isa
    logger.info("kernels: torch (measured to be faster here than the native ones)")
    return None


def has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def onednn_allows_bfloat16() -> bool:
    """``ONEDNN_MAX_CPU_ISA`` can restrict oneDNN. True without oneDNN."""
    return not has_onednn() or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def multiplies_bfloat16() -> bool:
    """AVX512-BF16 or AMX on x86, BF16 on Arm."""
    if not hasattr(torch.cpu, "get_capabilities"):  # older releases
        return False
    if not onednn_allows_bfloat16():
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
