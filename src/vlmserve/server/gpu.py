"""Stats of the GPU that the engine runs on, from NVML."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuStats:
    """None: the driver does not report it, as for a part of a divided GPU."""

    index: int
    """The driver's number."""
    utilization: float | None
    """Fraction of recent time in which anything ran."""
    used_bytes: int | None
    total_bytes: int | None
    process_bytes: int | None
    """Memory of one process."""


class GpuReader:
    """The first call loads the driver's library, which may take seconds."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._broken = False

    def read(self, uuid: str, pid: int) -> GpuStats | None:
        """Read the stats of a GPU and of a process on it. None without a driver; the reason is logged once."""
        if self._broken:
            return None
        try:
            if self._nvml is None:
                self._nvml = _open_nvml()
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            index = self._nvml.nvmlDeviceGetIndex(handle)
        except ImportError:
            self._give_up("pip install 'vlmserve[gpu]' adds what reads them")
            return None
        except self._errors() as error:
            self._give_up(str(error))
            return None
        return self._stats(handle, index, pid)

    def _stats(self, handle: Any, index: int, pid: int) -> GpuStats:
        nvml = self._nvml
        memory = self._or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        rates = self._or_none(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        processes = self._or_none(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
        own = [process.usedGpuMemory for process in processes if process.pid == pid]
        return GpuStats(
            index=index,
            utilization=None if rates is None else rates.gpu / 100,
            used_bytes=None if memory is None else memory.used,
            total_bytes=None if memory is None else memory.total,
            process_bytes=own[0] if own else None,
        )

    def _or_none(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._errors():
            return None

    def _errors(self) -> type[Exception]:
        error: type[Exception] = OSError if self._nvml is None else self._nvml.NVMLError
        return error

    def _give_up(self, reason: str) -> None:
        self._broken = True
        logger.warning("/metrics has no stats of the GPU: %s", reason)


def _open_nvml() -> Any:
    """Raises ImportError for a missing library, OSError for a missing driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise OSError(str(error)) from None
    return pynvml
