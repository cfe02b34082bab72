"""Stand-ins for modules that a test cannot import."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType

import pytest


@contextlib.contextmanager
def replaced_modules(stubs: Mapping[str, ModuleType]) -> Iterator[None]:
    """Replace modules in the block. Other modules that it imports stay, else later tests import them twice."""
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in stubs.items():
            patch.setitem(sys.modules, name, stub)
        yield
