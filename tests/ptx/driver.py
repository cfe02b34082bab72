"""A driver for Triton whose GPU is the emulator: kernels are compiled for an architecture and executed on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from tests.ptx import recording
from tests.ptx.emulator import Executable
from tests.ptx.program import parse
from vlmserve.kernels.triton import attention, products, shared_memory, unpacking

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""That a program may have, by architecture."""
THREADS = 1024

_counted: list[Executable] | None = None
"""What was launched while launches are counted."""


class _Tools:
    """What Triton calls of a driver when a kernel is loaded."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[self._arch], "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Returns the module, the function, its registers and spills, and how many threads it may have."""
        return None, Executable(parse(binary.decode())), 0, 0, THREADS


class _Launcher:
    """A compiled kernel. It is launched forwards and backwards by turns."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._names = [name for name, kind in source.signature.items() if kind != "constexpr"]
        self._kinds = list(source.signature.values())
        self._shared = metadata.shared
        self._launches = 0

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: Executable, packed: Any, metadata: Any, enter: Any,
        leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        given = [(kind, one) for kind, one in zip(self._kinds, arguments, strict=True) if kind != "constexpr"]
        values = [_value(kind, one) for kind, one in given]
        tensors = [one for _, one in given if isinstance(one, Tensor)]
        # In a table are addresses of tensors that the kernel is not given.
        allowed = () if "table_ptr" in self._names else ranges(tensors)
        self._launches += 1
        backwards = self._launches % 2 == 0
        packed, grid, counted = function.packed(values), (x, y, z), _counted is not None
        if _counted is not None and function not in _counted:
            function.forget_counts()
            _counted.append(function)
        function.run(packed, grid, self._shared, allowed, backwards=backwards, counted=counted)
        if recording.current is not None:
            again = functools.partial(function.run, packed, grid, self._shared, allowed, backwards=not backwards)
            recording.current.launched(again, tensors)


def _value(kind: str, argument: Any) -> int | float:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return float(argument) if kind.startswith("fp") else int(argument)


def ranges(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """The memory that tensors are in."""
    storages = [one.untyped_storage() for one in tensors if one.device.type == "cpu" and one.layout == torch.strided]
    return sorted({(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages})


class Driver(DriverBase):  # type: ignore[misc]
    """arch: one of `SHARED_BYTES`."""

    def __init__(self, arch: int) -> None:
        super().__init__()
        self._arch = arch
        self.utils = _Tools(arch)
        self.launcher_cls = _Launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is timed in the emulator")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass


@contextmanager
def emulated(arch: int) -> Iterator[None]:
    """Launches in it run in the emulator."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        # PTX is executed as it is: the assembler's turn is in test_compiled.
        patch.setattr(CUDABackend, "make_cubin", lambda self, source, *_: source.encode())
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        for module in (attention, products, unpacking):
            patch.setattr(module, "has_assembly", lambda device: True)
        patch.setattr(shared_memory, "shared_bytes", lambda device: (SHARED_BYTES[arch] + 1024) // 2 - 2048)
        driver.set_active(Driver(arch))
        yield


@contextmanager
def counting() -> Iterator[list[Executable]]:
    """Yields kernels that were launched in it, whose `counts` are of these launches."""
    global _counted
    _counted = found = []
    try:
        yield found
    finally:
        _counted = None
