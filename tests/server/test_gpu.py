"""Stats of a GPU, from a library that says what a driver would."""

from __future__ import annotations

import os
import sys

import pytest

from tests.server.nvml import UUID, FakeNvml
from vlmserve.server.gpu import GpuReader, GpuStats

RATES = "nvmlDeviceGetUtilizationRates"
MEMORY = "nvmlDeviceGetMemoryInfo"
PROCESSES = "nvmlDeviceGetComputeRunningProcesses"


@pytest.fixture
def driver(monkeypatch):
    """Puts a library in place that lacks some functions; "all" is one that is not installed."""

    def install(*lacks: str) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None if lacks == ("all",) else FakeNvml(lacks))

    return install


def test_driver_reports_gpu_load_and_memory(driver):
    driver()
    assert GpuReader().read(UUID, os.getpid()) == GpuStats(3, 0.75, 50_000, 80_000, 40_000)


def test_process_unknown_to_the_driver_has_no_memory(driver):
    driver()
    assert GpuReader().read(UUID, 2).process_bytes is None


def test_figures_missing_from_a_gpu_are_omitted(driver):
    driver(RATES, PROCESSES)
    assert GpuReader().read(UUID, os.getpid()) == GpuStats(3, None, 50_000, 80_000, None)
    driver(MEMORY)
    assert GpuReader().read(UUID, os.getpid()) == GpuStats(3, 0.75, None, None, 40_000)


@pytest.mark.parametrize(
    ("lacks", "uuid", "reason"),
    [
        pytest.param("all", UUID, "vlmserve[gpu]", id="not installed"),
        pytest.param("nvmlInit", UUID, "nvmlInit", id="no driver"),
        pytest.param("nothing", "GPU-0", "Not Found", id="another GPU"),
    ],
)
def test_missing_driver_is_reported_in_one_line(driver, caplog, lacks, uuid, reason):
    driver(lacks)
    reader = GpuReader()
    assert [reader.read(uuid, 1) for _ in range(3)] == [None] * 3
    [record] = caplog.records
    assert reason in record.getMessage()
