"""For pytest: kernels in Triton are compiled and run in the emulator, instead of being interpreted.

python -m pytest -p tests.ptx.plugin tests/kernels/triton
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "0"
# What is compiled ends as text for the emulator: no GPU's cache may get it.
os.environ["TRITON_CACHE_DIR"] = str(Path(tempfile.gettempdir(), "ptx-emulator-cache"))

ARCHITECTURES = (90,)


@pytest.fixture(scope="session", autouse=True, params=ARCHITECTURES)
def emulator(request: pytest.FixtureRequest) -> Iterator[None]:
    from tests.ptx.driver import emulated

    with emulated(int(os.environ.get("PTX_ARCH", request.param))):
        yield
