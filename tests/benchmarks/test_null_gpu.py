"""The library that stands in for CUDA's where there is no GPU."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import null_gpu
from benchmarks.null_gpu import Counts, counts

pytest.importorskip("triton", reason="CUDA's headers come with Triton, which is not installed", exc_type=ImportError)
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

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


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is not built for CUDA")
def test_graphs_reuse_the_memory_of_others(tmp_path: Path) -> None:
    seen = null_gpu.environment(null_gpu.build(tmp_path))
    run = subprocess.run(
        [sys.executable, "-c", RESERVED_BY_GRAPHS], env=seen, capture_output=True, text=True, check=True
    )
    first, *others = json.loads(run.stdout)
    assert others == [first] * 3


CAPTURED_LATER = """
import dataclasses, json, msgspec, sys, torch
from triton import knobs
from benchmarks import gpu_decode, gpu_stages
from vlmserve.devices.cuda import TritonDevice
from vlmserve.runner.kv import PoolSizes
from vlmserve.runner.runner import ModelRunner
from vlmserve.runner.warm_up import warm_up_steps
from vlmserve.steps import AdapterLoad, CachedRequest, NewRequest, SchedulerOutput
from vlmserve.types import SamplingParams

executors, make = [], TritonDevice.executor
TritonDevice.executor = lambda self: executors.append(make(self)) or executors[-1]
config = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 128}
if "experts" in sys.argv:
    config |= {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config |= {"norm_topk_prob": True, "head_dim": 16, "mlp_only_layers": [], "decoder_sparse_step": 1}
sizes = dataclasses.replace(gpu_stages.TINY, config=gpu_stages.TINY.config | config)
model = gpu_decode.random_model(torch.device("cuda"), sizes, "none", eager=False)
adapters = [gpu_decode.random_adapter(model, loaded=False)] if "adapters" in sys.argv else []
runner = ModelRunner(model, PoolSizes(16, 4000), gpu_decode.no_grammars, *adapters)
limit = 160 if "experts" in sys.argv else 64
warm_up_steps(runner, max_num_seqs=96, max_num_batched_tokens=limit, max_model_len=1400, seconds=600)
captured, compiled = [executors[0].num_captured], []
knobs.runtime.jit_post_compile_hook = lambda fn, **rest: compiled.append(fn.name)
digest, loads = (gpu_decode.ADAPTER, [AdapterLoad(0, gpu_decode.ADAPTER)]) if adapters else (b"", [])
runner.submit(SchedulerOutput(adapter_loads=loads)).result()
greedy = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
biased = msgspec.structs.replace(greedy, logit_bias={3: 1.0}, frequency_penalty=0.5)

def request(name, start, rows, blocks, **options):
    ids, params = [0] * (start + rows), options.pop("params", greedy)
    return NewRequest(name, start, rows, start + rows, ids, [blocks], params, 0, 1400, [], **options)

# Whole prompts, and chunks after long prefixes, alone and beside decodes of short and long contexts.
for start, rows in ((0, 12), (0, 31), (1300, 2), (1300, 60), (0, limit)):
    for beside in ([], [3], [1300]):
        prompt = request("prompt", start, rows - len(beside), [0] * 90, params=biased, adapter=digest)
        decodes = [request("decode", context, 1, [0] * 90) for context in beside]
        runner.submit(SchedulerOutput(new_requests=[*decodes, prompt])).result()
        finished = [one.request_id for one in (*decodes, prompt)]
        runner.submit(SchedulerOutput(finished_request_ids=finished)).result()
for count in (96, 40, 3):
    for longest in (3, 590):
        requests = [
            request(str(number), (longest if number == 0 else 3) - 1, 1, list(range(number * 40, number * 40 + 38)),
                    adapter=digest if number % 2 == 0 else b"")
            for number in range(count)
        ]
        runner.submit(SchedulerOutput(new_requests=requests)).result()
        for step in range(3):
            following = [CachedRequest(one.request_id, one.start + 1 + step, 1) for one in requests]
            runner.submit(SchedulerOutput(cached_requests=following)).result()
        runner.submit(SchedulerOutput(finished_request_ids=[one.request_id for one in requests])).result()
        captured.append(executors[0].num_captured)
print(json.dumps([compiled, *captured]))
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is not built for CUDA")
@pytest.mark.parametrize("kind", ["plain", "adapters", "experts"])
def test_nothing_is_captured_or_compiled_after_start(tmp_path: Path, kind: str) -> None:
    """A batch that fills the GPU has two graphs: contexts are whole, or some are split."""
    seen = null_gpu.environment(null_gpu.build(tmp_path))
    command = [sys.executable, "-c", CAPTURED_LATER, kind]
    run = subprocess.run(command, env=seen, capture_output=True, text=True, check=True)
    compiled, at_start, *later = json.loads(run.stdout)
    assert compiled == []
    assert at_start == (len((96, 80, 64, 48, 32, 16, 8, 4, 2, 1)) + 1) * (2 if kind == "adapters" else 1)
    assert later == [at_start] * 6


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_torch_without_cuda_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert null_gpu.main([]) == 2
    assert "not built for CUDA" in capsys.readouterr().err
