"""For pytest: kernels in Triton are compiled and run in the emulator, instead of being interpreted.

Tests of the engine by the data flow of a GPU (`tests.static_device`) run by these kernels, in recorded graphs.

python -m pytest -p tests.ptx.plugin tests/kernels/triton tests/engine/test_captures.py tests/adapters/test_captured.py
python -m pytest -p tests.ptx.plugin tests/engine -k static
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["TRITON_INTERPRET"] = "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--arch", type=int, default=90, help="the architecture to compile for: 80, 89 or 90")


@pytest.fixture(scope="session", autouse=True)
def emulator(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use the emulator for all tests of the process.

    Triton caches text for the emulator in place of binaries, in a folder of its own. Its keys cover the kernel's
    source, the constants, the architecture and the compiler.
    """
    from tests import built, static_device
    from tests.ptx.device import EmulatedDevice
    from tests.ptx.driver import emulated

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(built.FOLDER / "ptx"))
        patch.setenv("TRITON_STORE_BINARY_ONLY", "1")
        # No test reads which line of a kernel an instruction comes from: a sixth of the compiler's time.
        patch.setenv("TRITON_DISABLE_LINE_INFO", "1")
        patch.setattr(static_device, "kind_of_device", EmulatedDevice)
        with emulated(request.config.getoption("arch")):
            yield
