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


def test_the_driver_tells_how_busy_and_how_full_a_gpu_is(driver):
    driver()
    assert GpuReader().read(UUID, os.getpid()) == GpuStats(3, 0.75, 50_000, 80_000, 40_000)


def test_a_process_that_the_driver_does_not_know_by_this_number_has_no_memory(driver):
    driver()
    assert GpuReader().read(UUID, 2).process_bytes is None


def test_what_a_gpu_does_not_tell_is_left_out(driver):
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
def test_where_nobody_can_be_asked_there_are_no_figures_and_one_line_says_why(driver, caplog, lacks, uuid, reason):
    driver(lacks)
    reader = GpuReader()
    assert [reader.read(uuid, 1) for _ in range(3)] == [None] * 3
    [record] = caplog.records
    assert reason in record.getMessage()
