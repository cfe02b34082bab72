"""Loads the compiled kernels, if they were built, and selects their instruction set. Callers must check shapes."""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType

import torch

from vlmserve.kernels.cpu_record import mismatch

logger = logging.getLogger(__name__)

INTERFACE = 12
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

COMPILE_HERE = (
    "in the clone, with GCC 11, Clang 12 or newer, type: "
    f"VLMSERVE_ISAS=here {sys.executable} -m pip install --no-deps -e ."
)
"""How to compile kernels for every instruction set of this machine. Older compilers leave some out."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def supported_isas() -> tuple[str, ...]:
    """Instruction sets of this build that the processor runs, best first. Empty without the extension."""
    return () if native is None else tuple(native.supported_isas())


def missing_isas() -> tuple[str, ...]:
    """Instruction sets that the processor runs and this build does not have, best first."""
    if native is None:
        return ()
    return tuple(isa for isa in native.runnable_isas() if isa not in supported_isas())


def lacks_best_isa() -> bool:
    return native is not None and native.runnable_isas()[0] != supported_isas()[0]


def selected_isa() -> str:
    """Raises RuntimeError if no kernels were built."""
    return str(extension().selected_isa())


def extension() -> ModuleType:
    if native is None:
        raise RuntimeError("the native kernels were not built: run python setup.py build_ext --inplace")
    return native
