"""The compiled kernels: whether they are there, and for which instruction set.

The extension is optional: where it was not built, or cannot serve a type, layers use torch. Its functions take
addresses and sizes, which costs a call less than torch's dispatcher would; shapes are for their callers to check.
"""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType

import torch

from vlmserve.errors import ConfigurationError

_native: ModuleType | None
try:
    _native = importlib.import_module("vlmserve.kernels._native")
except ImportError:
    _native = None

logger = logging.getLogger(__name__)

VARIABLE = "VLMSERVE_KERNELS"
CHOICES = ("auto", "torch", "native")
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""How the extension names the types that it computes."""


def supported_isas() -> tuple[str, ...]:
    """Instruction sets that this processor and this build have, the best first; empty without the extension."""
    return () if _native is None else tuple(_native.supported_isas())


def choose_kernels(choice: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether to run native kernels, and which.

    choice: "torch", "native", one of `supported_isas`, or "auto", which asks the environment (``VLMSERVE_KERNELS``) and
    else takes the best there is. Raises ConfigurationError for kernels that this machine does not have.
    """
    if choice == "auto":
        choice = os.environ.get(VARIABLE) or "auto"
    isas = supported_isas()
    if choice not in (*CHOICES, *isas):
        known = ", ".join((*CHOICES, *isas))
        raise ConfigurationError(f"--kernels {choice}: not available on this machine; choose one of {known}")
    if choice == "native" and not isas:
        raise ConfigurationError("the native kernels were not built: install vlmserve where there is a C++ compiler")
    if choice == "torch" or device.type != "cpu" or dtype not in DTYPES:
        return False
    if not isas:
        logger.info("kernels: torch (no native ones: vlmserve was installed without a C++ compiler)")
        return False
    isa = isas[0] if choice in CHOICES else choice
    extension().select_isa(isa)
    logger.info("kernels: native, %s", isa)
    return True


def extension() -> ModuleType:
    """The compiled module. Raises RuntimeError where it was not built."""
    if _native is None:
        raise RuntimeError("the native kernels were not built")
    return _native
