"""NVIDIA's library as it looks from Python, of a machine with one GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace

UUID = "GPU-8f0c6a52-0000-0000-0000-000000000001"


class NVMLError(Exception):
    """What every function raises."""


class FakeNvml:
    """Stands for the module `pynvml`. lacks: names of functions that this GPU does not support; `nvmlInit` among them
    is a machine without a driver."""

    NVMLError = NVMLError

    def __init__(self, lacks: tuple[str, ...] = ()) -> None:
        self._lacks = lacks

    def _check(self, name: str) -> None:
        if name in self._lacks:
            raise NVMLError(f"{name}: Not Supported")

    def nvmlInit(self) -> None:
        self._check("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != UUID:
            raise NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return 3

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self._check("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=80_000, used=50_000, free=30_000)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self._check("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=75, memory=40)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        self._check("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=1, usedGpuMemory=7), SimpleNamespace(pid=os.getpid(), usedGpuMemory=40_000)]
