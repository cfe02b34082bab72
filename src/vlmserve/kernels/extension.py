"""The compiled kernels: whether they are there, and for which instruction set.

The extension is optional: where it was not built, or cannot serve a type, layers use torch. Its functions take
addresses and sizes, which costs a call less than torch's dispatcher would; shapes are for their callers to check.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import torch

from vlmserve.kernels.cpu_record import mismatch

logger = logging.getLogger(__name__)

INTERFACE = 10
"""Version of the functions' arguments, as csrc/module.cpp has it."""


def _load() -> ModuleType | None:
    try:
        native = importlib.import_module("vlmserve.kernels._native")
    except ImportError:
        return None
    version = getattr(native, "interface", None)
    reason = mismatch(native) if version == INTERFACE else f"interface {version}, not {INTERFACE}"
    if reason is not None:
        logger.warning(
            "ignoring outdated native kernels (%s); rebuild them: python setup.py build_ext --inplace", reason
        )
        return None
    return native


_native = _load()

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""How the extension names the types that it computes."""


def supported_isas() -> tuple[str, ...]:
    """Instruction sets that this processor and this build have, the best first; empty without the extension."""
    return () if _native is None else tuple(_native.supported_isas())


def selected_isa() -> str:
    """The instruction set whose kernels run. Raises RuntimeError where none were built."""
    return str(extension().selected_isa())


def extension() -> ModuleType:
    """The compiled module. Raises RuntimeError where it was not built."""
    if _native is None:
        raise RuntimeError("the native kernels were not built")
    return _native
