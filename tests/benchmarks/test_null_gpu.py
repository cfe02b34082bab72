"""The library that stands in for CUDA's where there is no GPU."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import null_gpu
from benchmarks.null_gpu import Counts, counts
from tests.benchmarks import filled, lacking

pytest.importorskip("triton", reason="CUDA's headers come with Triton, which is not installed", exc_type=ImportError)
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

ON_NULL_GPU = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is not built for CUDA")
BATCHES = (96, 80, 64, 48, 32, 16, 8, 4, 2, 1)
PROMPT_STEPS, LAYER_LAUNCHES, MOST_KERNELS = 13, 10, 50
"""Steps at start that are not captured, launches of a step in each layer, and compiled kernels of a plain model."""
CAPTURED = 900
"""CUDA's error for what may not be called while a stream is captured."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(null_gpu.build(tmp_path_factory.mktemp("null_gpu"))))


def stream_of(library: ctypes.CDLL) -> ctypes.c_void_p:
    stream = ctypes.c_void_p()
    assert library.cudaStreamCreateWithPriority(ctypes.byref(stream), 0, 0) == 0
    return stream


def launch(library: ctypes.CDLL, stream: ctypes.c_void_p) -> None:
    handle = ctypes.c_void_p()
    assert library.cublasCreate_v2(ctypes.byref(handle)) == 0
    assert library.cublasSetStream_v2(handle, stream) == 0
    assert library.cublasGemmEx(handle) == 0


def change(before: Counts, after: Counts) -> dict[str, int]:
    return {name: value for name in before._fields if (value := getattr(after, name) - getattr(before, name))}


def test_memory_holds_what_is_copied_to_it(library: ctypes.CDLL) -> None:
    device = ctypes.c_void_p()
    assert library.cudaMalloc(ctypes.byref(device), ctypes.c_size_t(1000)) == 0
    pinned = ctypes.c_void_p()
    assert library.cudaHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(1000), 0) == 0
    ctypes.memset(pinned, 7, 1000)
    before = counts(library)
    assert library.cudaMemcpyAsync(device, pinned, ctypes.c_size_t(1000), 4, None) == 0
    assert change(before, counts(library)).keys() == {"copies", "busy"}
    assert ctypes.string_at(device, 1000) == b"\7" * 1000
    result = ctypes.create_string_buffer(1000)
    assert library.cudaMemcpyAsync(result, device, ctypes.c_size_t(1000), 4, None) == 0
    assert result.raw == b"\7" * 1000
    assert change(before, counts(library))["waits"] == 1, "the host waits for copies to pageable memory"
    assert library.cudaFree(device) == 0


def test_graphs_launch_what_was_captured(library: ctypes.CDLL) -> None:
    stream, graph = stream_of(library), ctypes.c_void_p()
    graphs = {number: ctypes.c_void_p() for number in (3, 2)}
    before = counts(library)
    for number, executable in graphs.items():
        assert library.cudaStreamBeginCapture(stream, 1) == 0
        for _ in range(number):
            launch(library, stream)
        assert library.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
        assert library.cudaGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)) == 0
    assert "busy" not in change(before, counts(library)), "what is captured does not run"
    for number, executable in graphs.items():
        before = counts(library)
        assert library.cudaGraphLaunch(executable, stream) == 0
        changed = change(before, counts(library))
        assert (changed["graphs"], changed["busy"]) == (1, number * 5000)
        assert counts(library).nodes == number, "not of the one that was captured last"


def test_capture_rejects_waits_and_allocations(library: ctypes.CDLL, capfd: pytest.CaptureFixture[str]) -> None:
    stream, place, graph = stream_of(library), ctypes.c_void_p(), ctypes.c_void_p()
    assert library.cudaStreamBeginCapture(stream, 1) == 0
    assert library.cudaStreamSynchronize(stream) == CAPTURED
    assert library.cudaMalloc(ctypes.byref(place), ctypes.c_size_t(16)) == CAPTURED
    assert library.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
    assert library.cudaStreamSynchronize(stream) == 0
    assert "cudaMalloc while a stream is captured" in capfd.readouterr().err


def test_addresses_of_the_host_are_refused(library: ctypes.CDLL) -> None:
    value, text = ctypes.c_void_p(), ctypes.create_string_buffer(16)
    assert library.cuPointerGetAttribute(ctypes.byref(value), 3, text) != 0


RESERVED_BY_GRAPHS = """
import json, torch
from vlmserve.devices.cuda import CudaCapture

device = torch.device("cuda")

def run():
    return torch.ones(2**26, dtype=torch.uint8, device=device) + 1

capture, kept, reserved = CudaCapture(device), [], []
for _ in range(4):
    kept.append(capture(run))
    reserved.append(torch.cuda.memory_reserved())
print(json.dumps(reserved))
"""


@ON_NULL_GPU
def test_graphs_reuse_the_memory_of_others(tmp_path: Path) -> None:
    seen = null_gpu.environment(null_gpu.build(tmp_path))
    run = subprocess.run(
        [sys.executable, "-c", RESERVED_BY_GRAPHS], env=seen, capture_output=True, text=True, check=True
    )
    first, *others = json.loads(run.stdout)
    assert others == [first] * 3


@ON_NULL_GPU
@pytest.mark.parametrize("kind", ["text", "lora", "images"])
def test_full_caches_and_steps_stay_within_the_limit(tmp_path: Path, kind: str) -> None:
    """The memory that was measured at start covers all buffers: of splits, uploads, graphs, adapters, images, copies of
    blocks and sampling."""
    filled.make(tmp_path / "model")
    found = printed_by("tests.benchmarks.filled", tmp_path, str(tmp_path / "model"), kind, NULL_GPU_MEMORY="640")
    assert found["failed"] == []
    assert found["blocks"] < filled.MOST_BLOCKS, "the limit decides"
    assert found["peak"] <= found["limit"]


@ON_NULL_GPU
def test_no_lack_of_memory_ends_the_engine(tmp_path: Path) -> None:
    """Errors are those of torch, Triton and cuBLAS: of allocators, graphs, kernels that are loaded, and handles."""
    filled.make(tmp_path / "model")
    found = printed_by("tests.benchmarks.lacking", tmp_path, str(tmp_path / "model"))
    assert found.keys() == {"cudaGraphInstantiate", *lacking.CALLS}
    for call, (during, afterwards) in found.items():
        assert afterwards == {}, call
        assert all("too little memory" in error for error in during.values()), call
        assert bool(during) == (call in lacking.FAILING), call


def printed_by(module: str, folder: Path, *arguments: str, **environment: str) -> Any:
    """What a module prints on a null GPU."""
    seen = null_gpu.environment(null_gpu.build(folder / "null_gpu")) | environment
    run = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=seen, capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


def started(folder: Path, *arguments: str) -> Any:
    """What `tests.benchmarks.started` prints on a null GPU."""
    return printed_by("tests.benchmarks.started", folder, *arguments)


@ON_NULL_GPU
@pytest.mark.parametrize("kind", ["plain", "lora", "x-lora", "experts", "gemma", "qwen"])
def test_nothing_is_captured_or_compiled_after_start(tmp_path: Path, kind: str) -> None:
    """A batch that fills the GPU has two graphs: contexts are whole, or some are split."""
    found = started(tmp_path, kind)
    assert found["compiled later"] == []
    assert found["captured"] == (len(BATCHES) + 1) * (2 if kind.endswith("lora") else 1)
    assert found["captured later"] == [found["captured"]] * 6


@ON_NULL_GPU
def test_start_launches_little_for_each_layer(tmp_path: Path) -> None:
    """A start with a warm cache of compiled kernels takes the time of these launches, and of loading each kernel."""
    few, many = (started(tmp_path, "plain", str(layers)) for layers in (2, 4))
    assert many["captured"] == few["captured"] == len(BATCHES) + 1
    assert many["compiled"] == few["compiled"] <= MOST_KERNELS
    assert (many["launches"] - few["launches"]) / 2 <= LAYER_LAUNCHES * (few["captured"] + PROMPT_STEPS)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_torch_without_cuda_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert null_gpu.main([]) == 2
    assert "not built for CUDA" in capsys.readouterr().err
