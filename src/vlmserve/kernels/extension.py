"""Loads the compiled kernels, if they were built, and selects their instruction set. Callers must check shapes."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import torch

from vlmserve.kernels.cpu_record import mismatch

logger = logging.getLogger(__name__)

INTERFACE = 11
"""Version of the functions' arguments, equal to csrc/module.cpp."""


def load() -> ModuleType | None:
    """Import the kernels. None: they were not built, or for another version."""
    try:
        module = importlib.import_module("vlmserve.kernels._native")
    except ImportError:
        return None
    version = getattr(module, "interface", None)
    reason = mismatch(module) if version == INTERFACE else f"interface {version}, not {INTERFACE}"
    if reason is not None:
        logger.warning(
            "ignoring outdated native kernels (%s); rebuild them: python setup.py build_ext --inplace", reason
        )
        return None
    return module


native = load()
"""None without kernels. `extension` raises then."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def supported_isas() -> tuple[str, ...]:
    """Best first. Empty without the extension."""
    return () if native is None else tuple(native.supported_isas())


def selected_isa() -> str:
    """Raises RuntimeError if no kernels were built."""
    return str(extension().selected_isa())


def extension() -> ModuleType:
    if native is None:
        raise RuntimeError("the native kernels were not built: run python setup.py build_ext --inplace")
    return native
