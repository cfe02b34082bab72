"""A GPU as a device: what it computes of the driver's answers, and, where there is one, how it behaves."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vlmserve.devices.cuda import CudaDevice

GIB = 2**30
GPU = torch.device("cuda:1")


class Driver:
    """A GPU of 80 GiB. beside: what other processes hold. held: by the tensors of this one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, beside: int) -> None:
        self.beside, self.held, self.peak, self.libraries = beside, 0, 0, 0
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "mem_get_info", lambda device: (80 * GIB - self.used, 80 * GIB))
        monkeypatch.setattr(cuda, "memory_allocated", lambda device: self.held)
        monkeypatch.setattr(cuda, "memory_reserved", lambda device: self.held)
        monkeypatch.setattr(cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda device: setattr(self, "peak", self.held))
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(cuda, name, lambda *_: None)

    @property
    def used(self) -> int:
        return self.beside + self.held + self.libraries

    def step(self) -> None:
        """Takes 6 GiB while it runs, and 1 GiB for libraries that it loads."""
        self.peak = max(self.peak, self.held + 6 * GIB)
        self.libraries = GIB


@pytest.mark.parametrize(
    ("beside", "fraction", "expected"),
    [
        # 14 GiB of weights, 6 of activations, 1 of libraries, 2 for images.
        (0, 0.9, 72 - 14 - 6 - 1 - 2),
        # What others hold is theirs: two servers may have a share each.
        (36, 0.5, 40 - 14 - 6 - 1 - 2),
        # But there is no more than what is free.
        (50, 0.5, 30 - 14 - 6 - 1 - 2),
        (70, 0.9, 10 - 14 - 6 - 1 - 2),
    ],
)
def test_a_share_is_of_all_memory_and_covers_weights_activations_and_caches(
    monkeypatch: pytest.MonkeyPatch, beside: int, fraction: float, expected: int
) -> None:
    driver = Driver(monkeypatch, beside * GIB)
    device = CudaDevice(GPU)
    driver.held = 14 * GIB
    assert device.cache_budget(fraction, driver.step, reserved=2 * GIB) == expected * GIB


def test_a_second_model_does_not_count_the_tensors_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, 0)
    driver.held = 20 * GIB
    device = CudaDevice(GPU)
    driver.held += 10 * GIB
    assert device.cache_budget(0.5, driver.step) == (40 - 10 - 6 - 1) * GIB


def test_too_little_free_memory_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(monkeypatch, 50 * GIB)
    CudaDevice(GPU).cache_budget(0.9, driver.step)
    assert "30.0 of 80.0 GiB are free on cuda:1, less than --memory-fraction 0.9" in caplog.text


def test_a_gpu_has_the_name_that_the_driver_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"12-{device.index}"))
    assert CudaDevice(GPU).gpu_uuid == "GPU-12-1"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_uploads_arrive_whole_though_their_arrays_change_behind_them() -> None:
    device = CudaDevice(torch.device("cuda"))
    values = np.arange(2**20)
    uploaded = []
    for number in range(20):
        values += number
        uploaded.append((device.upload(values), values.copy()))
    for tensor, expected in uploaded:
        assert np.array_equal(tensor.cpu().numpy(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_clock_measures_what_the_device_computes() -> None:
    device = CudaDevice(torch.device("cuda"))
    matrix = torch.ones(4096, 4096, device="cuda")
    clock = device.clock()
    for _ in range(10):
        matrix = matrix @ matrix / 4096
    clock.mark()
    clock.mark()
    computed, nothing = clock.seconds()
    assert computed > nothing >= 0
