"""A GPU as a device: what it computes of the driver's answers, and, where there is one, how it behaves."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.lazy_stream import LazyStream
from vlmserve.devices.choice import open_device
from vlmserve.devices.cuda import CudaCapture, CudaDevice, TritonDevice, open_cuda
from vlmserve.families.spec import ExpertsSpec
from vlmserve.kernels.operations import NO_EPILOGUE
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.kernels.torch_float8 import Float8LinearKernel
from vlmserve.kernels.torch_int4 import Int4LinearKernel
from vlmserve.kernels.torch_products import QuantizedLinearKernel, TorchLinearKernel
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.layer_specs import AttentionSpec

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
        self.current: list[torch.device] = []
        monkeypatch.setattr(cuda, "set_device", self.current.append)
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
def test_memory_fraction_covers_weights_activations_caches(
    monkeypatch: pytest.MonkeyPatch, beside: int, fraction: float, expected: int
) -> None:
    driver = Driver(monkeypatch, beside * GIB)
    device = CudaDevice(GPU)
    driver.held = 14 * GIB
    assert device.cache_budget(fraction, driver.step, reserved=2 * GIB) == expected * GIB


def test_second_model_ignores_tensors_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, 0)
    driver.held = 20 * GIB
    device = CudaDevice(GPU)
    driver.held += 10 * GIB
    assert device.cache_budget(0.5, driver.step) == (40 - 10 - 6 - 1) * GIB


def test_too_little_free_memory_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(monkeypatch, 50 * GIB)
    CudaDevice(GPU).cache_budget(0.9, driver.step)
    assert "30.0 of 80.0 GiB are free on cuda:1, less than --memory-fraction 0.9" in caplog.text


def test_gpu_name_comes_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"12-{device.index}"))
    assert CudaDevice(GPU).gpu_uuid == "GPU-12-1"


@pytest.fixture(autouse=True)
def _kernels_overlap_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """To open a GPU says how all kernels of the process are launched."""
    if importlib.util.find_spec("triton") is not None:
        from vlmserve.kernels.triton.launching import Kernel

        monkeypatch.setattr(Kernel, "overlaps", Kernel.overlaps)


def opened(monkeypatch: pytest.MonkeyPatch, kernels: str, capability: tuple[int, int]) -> CudaDevice:
    """What a GPU with this compute capability is opened as."""
    driver = Driver(monkeypatch, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device, dtype = open_device(GPU, kernels, torch.bfloat16, automatic=True)
    assert driver.current == [GPU], "what is launched by other libraries goes there too"
    assert dtype == torch.bfloat16
    assert isinstance(device, CudaDevice)
    return device


def test_kernels_in_triton_run_where_they_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert opened(monkeypatch, "auto", (9, 0)).kernels == "triton"
    assert not caplog.text
    assert opened(monkeypatch, "torch", (9, 0)).kernels == "torch"
    assert "kernels: torch on cuda:1 (--kernels torch)" in caplog.text
    assert opened(monkeypatch, "auto", (7, 5)).kernels == "torch"
    assert "this GPU has 7.5" in caplog.text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert opened(monkeypatch, "auto", (9, 0)).kernels == "torch"
    assert "triton is not installed" in caplog.text
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert opened(monkeypatch, "auto", (9, 4)).kernels == "torch"
    assert "NVIDIA" in caplog.text


def test_what_triton_cannot_do_is_torchs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    caplog.set_level("INFO")
    Driver(monkeypatch, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = TritonDevice(GPU)
    assert device.attention([AttentionSpec(4, 2, 64, 0.125)], torch.bfloat16).name == "triton"
    assert device.attention([AttentionSpec(4, 2, 1024, 0.125)], torch.bfloat16).name == "torch"
    assert "attention: torch, without CUDA graphs (a head of 1024 elements is larger than 512)" in caplog.text
    groups = torch.ones(4, 3)
    odd = QuantizedWeight(4, 16, torch.zeros(4, 48, dtype=torch.uint8), groups, groups)
    assert isinstance(device.linear(odd, None, NO_EPILOGUE, torch.bfloat16), QuantizedLinearKernel)
    assert "linear of (4, 48): torch" in caplog.text
    assert "dequantized in each step (torch's 4-bit matmul does not support 4-bit groups of 16)" in caplog.text
    values, groups = torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 2)
    even, huge = (QuantizedWeight(4, 32, values, scale * groups, groups) for scale in (1.0, 1e6))
    assert not isinstance(device.linear(even, None, NO_EPILOGUE, torch.bfloat16), TorchLinearKernel)
    assert isinstance(device.linear(huge, None, NO_EPILOGUE, torch.bfloat16), Int4LinearKernel)
    assert "linear of (16, 64): torch's 4-bit matmul" in caplog.text
    assert isinstance(device.linear(huge, None, NO_EPILOGUE, torch.float16), QuantizedLinearKernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert isinstance(CudaDevice(GPU).linear(even, None, NO_EPILOGUE, torch.bfloat16), QuantizedLinearKernel)
    plain = torch.zeros(4, 48, dtype=torch.bfloat16)
    assert not isinstance(device.linear(plain, None, NO_EPILOGUE, torch.bfloat16), TorchLinearKernel)
    assert isinstance(device.table(odd, torch.bfloat16), QuantizedLinearKernel)
    assert device.norm(torch.ones(64), None, 1e-6) is not None
    assert device.norm(torch.ones(2**15), None, 1e-6) is None
    assert device.norm(torch.ones(64), None, 1e-6, 1.0) is not None


@pytest.mark.parametrize(("head_size", "sizes"), [(64, [4, 2, 1]), (1024, [])])
def test_graphs_need_attention_that_reads_on_device(
    monkeypatch: pytest.MonkeyPatch, head_size: int, sizes: list[int]
) -> None:
    pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    Driver(monkeypatch, 0)
    device = TritonDevice(GPU)
    backend = device.attention([AttentionSpec(4, 2, head_size, 0.125)], torch.bfloat16)
    assert device.padded_rows(3, 3) is None
    assert device.decode_sizes(3) == [], "no decoder has graphs, as with several ranks"
    device.executor()
    assert backend.reads_on_device == bool(sizes)
    assert device.decode_sizes(3) == sizes
    assert device.padded_rows(3, 3) == (4 if sizes else None)
    assert device.padded_rows(30, 0) is None
    device.enforce_eager()
    assert device.padded_rows(3, 3) is None


def test_experts_without_kernels_have_no_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    caplog.set_level("INFO")
    Driver(monkeypatch, 0)
    device = TritonDevice(GPU)
    device.attention([AttentionSpec(4, 2, 64, 0.125)], torch.bfloat16)
    device.executor()
    assert device.decode_sizes(2) == [2, 1]
    assert device.experts(ExpertsSpec(count=4, top_k=2, inner_size=16), None, {}) is None
    assert "experts: one matmul after the other, without CUDA graphs" in caplog.text
    assert device.decode_sizes(2) == []


def test_graph_bytes_are_freed_memory_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, device = Driver(monkeypatch, 0), TritonDevice(GPU)
    streams = Streams(monkeypatch)

    def run() -> None:
        assert streams.current != "default", "libraries have workspaces for each stream"
        driver.step()
        driver.held += GIB

    driver.held = 14 * GIB
    assert device.graph_bytes(run) == 5 * GIB
    device.enforce_eager()
    assert device.graph_bytes(run) == 0


def test_float8_stays_where_a_gpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    caplog.set_level("INFO")
    Driver(monkeypatch, 0)
    scales = torch.rand(16, 1)
    weight = QuantizedWeight(8, 64, torch.zeros(16, 64, dtype=torch.uint8), scales, 0 * scales, is_float8=True)
    for capability, stays in (((9, 0), True), ((8, 9), False), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, now=capability: now)
        for device in (TritonDevice(GPU), CudaDevice(GPU)):
            assert device.multiplies(weight) == stays
            if stays:
                assert isinstance(device.linear(weight, None, NO_EPILOGUE, torch.bfloat16), Float8LinearKernel)
                assert isinstance(device.table(weight, torch.bfloat16), Float8LinearKernel)
    assert "linear of (16, 64): dequantized from float8 (float8 matmuls need compute capability 8.9" in caplog.text


def test_host_blocks_stay_registered_while_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, 0)
    registered: list[int] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: registered.append(address) or 0,
        cudaHostUnregister=lambda address: registered.remove(address) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr("vlmserve.devices.cuda.CudaCopyStream", lambda device: LazyStream(lazy=False))
    device = CudaDevice(GPU)
    backend = TorchReference()
    layers = [backend.allocate(4, 16, AttentionSpec(2, 1, 8, 1.0), torch.bfloat16, torch.device("cpu"))]
    blocks = device.host_blocks(layers, 4, lambda count, where: layers)
    assert len(registered) == 1
    blocks.save([0], [0])
    del blocks
    gc.collect()
    assert registered == []


@pytest.mark.parametrize(
    ("capability", "overlaps"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)]
)
def test_kernels_are_launched_early_where_gpus_can(
    capability: tuple[int, int], overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Driver(monkeypatch, 0)
    kernel = pytest.importorskip("vlmserve.kernels.triton.launching").Kernel
    monkeypatch.setattr(kernel, "overlaps", not overlaps)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device, _ = open_cuda(GPU, "auto", torch.bfloat16, automatic=False)
    assert isinstance(device, TritonDevice)
    assert kernel.overlaps == overlaps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_uploads_survive_changes_of_their_arrays() -> None:
    device = CudaDevice(torch.device("cuda"))
    values = np.arange(2**20)
    uploaded = []
    for number in range(20):
        values += number
        # What is uploaded next takes its place, but not before this copy of it is made.
        uploaded.append((device.upload([values])[0].clone(), values.copy()))
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


class Streams:
    """Stands in for CUDA's streams and captures. ends_badly: the end of a capture raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: object = "default"
        self.captured: list[tuple[object, object]] = []
        self.awaited: list[object] = []
        """By the default stream."""
        self.ends_badly = False
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "Stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
        monkeypatch.setattr(cuda, "current_stream", lambda device: SimpleNamespace(wait_stream=self.awaited.append))
        monkeypatch.setattr(cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
        monkeypatch.setattr(cuda, "graph_pool_handle", object)
        monkeypatch.setattr(cuda, "stream", self.on)
        monkeypatch.setattr(cuda, "graph", self.graph)
        monkeypatch.setattr("vlmserve.devices.cuda.unowned", lambda result: result)

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: object, *, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        self.captured.append((stream, pool))
        before, self.current = self.current, stream
        yield
        if self.ends_badly:
            raise RuntimeError("CUDA error: out of memory")
        self.current = before


def test_captures_share_one_stream_and_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, capture = Streams(monkeypatch), CudaCapture(GPU)
    for _ in range(3):
        capture(lambda: torch.ones(1))
    assert len(streams.captured) == 3
    assert len(set(map(id, (stream for stream, _ in streams.captured)))) == 1
    assert len(set(map(id, (pool for _, pool in streams.captured)))) == 1


def test_captured_results_are_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    Streams(monkeypatch)
    result = CudaCapture(GPU)(lambda: torch.arange(6.0).view(2, 3)[:, 1:])()
    assert result.is_contiguous(), "only the address of its memory is kept"
    assert result.tolist() == [[1, 2], [4, 5]]


def test_a_capture_that_fails_restores_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    streams.ends_badly = True
    with pytest.raises(RuntimeError, match="out of memory"):
        CudaCapture(GPU)(lambda: torch.ones(1))
    assert streams.current == "default"


def test_a_step_waits_for_a_capture_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has launched reads the step's slots, which change back."""
    streams, ran = Streams(monkeypatch), list[object]()

    def run() -> torch.Tensor:
        ran.append(streams.current)
        raise torch.OutOfMemoryError("1 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        CudaCapture(GPU)(run)
    assert streams.awaited == ran


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_captured_calls_repeat_over_the_same_memory() -> None:
    device = torch.device("cuda")
    x = torch.ones(8, 8, device=device)
    again = CudaCapture(device)(lambda: x @ x + 1)
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        assert torch.equal(again(), torch.full_like(x, 8 * value * value + 1))
