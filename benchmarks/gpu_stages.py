"""The stages of `benchmarks.gpu`. Each returns what it measured as a dict for JSON; rates are in GB/s or tokens/s."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlmserve.config import QuantizationConfig
from vlmserve.devices.choice import open_device
from vlmserve.devices.device import Device, EagerExecutor, LayerExecutor
from vlmserve.kernels.attention import AttentionSpec, BatchMetadata
from vlmserve.layers.operations import Epilogue, arrange_layers
from vlmserve.models.decoder import Decoder
from vlmserve.models.families import decoder_spec
from vlmserve.models.protocols import LoadedModel
from vlmserve.quant.memory import weight_bytes
from vlmserve.quant.methods.rtn import round_to_nearest
from vlmserve.quant.model import quantize
from vlmserve.runner.runner import ModelRunner, RunningStep
from vlmserve.steps import CachedRequest, NewRequest, SchedulerOutput
from vlmserve.types import SamplingParams

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Sizes:
    """What is measured. config: of the model. streams: requests that decode at once, with `context` tokens each."""

    copied_bytes: int
    config: dict[str, Any]
    rows: tuple[int, ...]
    streams: tuple[int, ...]
    contexts: tuple[int, ...]
    context: int
    prompt: int
    steps: int
    repeats: int
    dtype: torch.dtype


def _mistral(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "mistral",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "sliding_window": None,
    }


FULL = Sizes(
    copied_bytes=2**32, config=_mistral(4096, 14336, 32, 32, 8, 32000), rows=(1, 8, 64, 128), streams=(1, 64, 256),
    contexts=(1024, 4096), context=1024, prompt=1000, steps=40, repeats=30, dtype=torch.bfloat16,
)  # fmt: skip
TINY = Sizes(
    copied_bytes=2**20, config=_mistral(64, 128, 2, 4, 2, 256), rows=(1, 8), streams=(1, 4), contexts=(32,), context=24,
    prompt=40, steps=3, repeats=2, dtype=torch.float32,
)  # fmt: skip


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of several runs, after one that does not count. The device has computed before the clock is read."""
    taken = []
    for _ in range(repeats + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def per_launch(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of one of many calls in a row, so that what the host needs for a launch is hidden where it can be."""
    calls = 20 if device.type == "cuda" else 1
    return seconds_of(lambda: [work() for _ in range(calls)], device, repeats) / calls


def bandwidth(device: torch.device, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """What a copy and a sum reach."""
    source = torch.zeros(sizes.copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    copied = seconds_of(lambda: target.copy_(source), device, sizes.repeats)
    read = seconds_of(source.sum, device, sizes.repeats)
    return {"copy_gb_s": 2 * source.nbytes / copied / 1e9, "read_gb_s": source.nbytes / read / 1e9}


def checks(device: torch.device, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """The kernels against float64, and pixie's answers against those of a CPU."""
    # Most of the time goes by compiling, a kernel for each case: several processes do it side by side.
    marks = ["-m", "gpu", "-n", "8", "--dist", "load"] if device.type == "cuda" else ["-k", "norms"]
    command = [sys.executable, "-m", "pytest", "-q", *marks, "tests/kernels/triton", "tests/devices"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    differs = _pixie_differs(device)
    return {"tests": lines[-1], "failed": run.returncode, "failures": failures, "pixie_differs": differs}


def _pixie_differs(device: torch.device) -> int:
    """How many of pixie's answers about the shapes are others on the device than on a CPU, in float32."""
    from vlmserve import LLM, SamplingParams

    questions = ["What colour is the circle?", "How many shapes are there?", "Where is the triangle?"]
    answers = []
    for name in ("cpu", str(device)):
        llm = LLM("pixie", device=name, dtype="float32", kv_cache_memory="64MiB")
        parts = [[{"type": "image", "image": "examples/shapes.png"}, {"type": "text", "text": q}] for q in questions]
        results = llm.chat(
            [[{"role": "user", "content": content}] for content in parts], SamplingParams(temperature=0, max_tokens=48)
        )
        answers.append([result.text for result in results])
    return sum(ours != theirs for ours, theirs in zip(*answers, strict=True))


def layer_products(config: dict[str, Any]) -> dict[str, tuple[int, int, Epilogue]]:
    """Outputs, inputs and epilogue of the products of a layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_size = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    return {
        "qkv": (hidden + 2 * kv_size, hidden, Epilogue()),
        "output": (hidden, hidden, Epilogue()),
        "gate and up": (2 * inner, hidden, Epilogue("silu", gated=True)),
        "down": (hidden, inner, Epilogue()),
    }


def products(device: torch.device, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """The four products of a layer, by kind of weight and rows: microseconds and the share of bytes a second."""
    on, dtype = open_device(device, "auto", sizes.dtype, automatic=False)
    report: dict[str, Any] = {"kernels": on.kernels}
    for name, (outputs, inputs, epilogue) in layer_products(sizes.config).items():
        weight = torch.randn(outputs, inputs, device=device, dtype=dtype) / inputs**0.5
        for kind in ("plain", "int8", "int4"):
            bits = {"int8": 8, "int4": 4}.get(kind)
            group = 128 if inputs % 128 == 0 else 32
            few = bits and round_to_nearest(weight, bits=bits, group_size=group, symmetric=False)
            product = on.linear(few or weight, None, epilogue, dtype)
            for rows in sizes.rows:
                x = torch.randn(rows, inputs, device=device, dtype=dtype)
                taken = per_launch(lambda product=product, x=x: product(x), device, sizes.repeats)  # type: ignore[misc]
                report[f"{name}, {kind}, {rows} rows"] = {
                    "microseconds": taken * 1e6,
                    "weight_gb_s": product.num_bytes / taken / 1e9,
                }
    return report


def attention(device: torch.device, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Attention of one layer's decodes, by their number and context: microseconds, and bytes of keys and values read a
    second."""
    config = sizes.config
    head = config["hidden_size"] // config["num_attention_heads"]
    spec = AttentionSpec(config["num_attention_heads"], config["num_key_value_heads"], head, head**-0.5)
    report: dict[str, Any] = {}
    for quantized in (False, True):
        on, dtype = open_device(device, "auto", sizes.dtype, automatic=False)
        backend = on.attention([spec], dtype, quantized_cache=quantized)
        report["backend"] = backend.name
        for streams in sizes.streams:
            for context in sizes.contexts:
                each = -(-context // BLOCK_SIZE)
                cache = backend.allocate(streams * each, BLOCK_SIZE, spec, dtype, device)
                metadata = _decodes(streams, context, device)
                plan = backend.prepare(metadata, BLOCK_SIZE, [spec], dtype)
                query, key, value = (
                    torch.randn(streams, heads, head, device=device, dtype=dtype)
                    for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
                )

                def work(q: Tensor = query, k: Tensor = key, v: Tensor = value, *rest: Any) -> Tensor:
                    return backend.attend(q, k, v, cache, spec, metadata, plan)  # noqa: B023

                taken = per_launch(work, device, sizes.repeats)
                size = 1 if quantized else dtype.itemsize
                read = 2 * streams * context * spec.num_kv_heads * (head * size + (4 if quantized else 0))
                report[f"{streams} x {context}{', 8 bits' if quantized else ''}"] = {
                    "microseconds": taken * 1e6,
                    "read_gb_s": read / taken / 1e9,
                }
    return report


def _decodes(streams: int, context: int, device: torch.device) -> BatchMetadata:
    each = -(-context // BLOCK_SIZE)
    tables = torch.arange(streams * each, dtype=torch.int32, device=device).view(streams, each)
    slots = tables[:, (context - 1) // BLOCK_SIZE].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    return BatchMetadata(
        query_starts=torch.arange(streams + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((streams,), context, dtype=torch.int32, device=device),
        block_tables=tables,
        slot_mapping=slots,
        query_lens=[1] * streams,
        host_context_lens=[context] * streams,
        num_decodes=streams,
    )


def decode(device: torch.device, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Tokens a second of decodes and the time to a prompt's first token, in plain weights and in 4 bits, layer by layer
    and as the device runs them."""
    report: dict[str, Any] = {}
    for scheme in ("none", "int4"):
        for eager in (True, False):
            model = random_model(device, sizes, scheme, eager=eager)
            for streams in sizes.streams if not eager else sizes.streams[:1]:
                name = f"{scheme}, {streams} streams{', layer by layer' if eager else ''}"
                report[name] = _streams(model, sizes, streams)
            del model
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return report


def random_model(device: torch.device, sizes: Sizes, scheme: str, *, eager: bool) -> LoadedModel:
    """A model of the config's shape with random weights. eager: its layers run one by one."""
    on, dtype = open_device(device, "auto", sizes.dtype, automatic=False)
    spec = decoder_spec(sizes.config)
    backend = on.attention(spec.attention, dtype)
    executor: LayerExecutor = EagerExecutor() if eager else on.executor()
    modules = nn.Module()
    modules.language_model = decoder = Decoder(spec, backend, executor, dtype=dtype, device=device)
    few = QuantizationConfig(scheme="int4", group_size=128 if spec.hidden_size % 128 == 0 else 32)
    random_weights(modules, on, None if scheme == "none" else few)
    return LoadedModel(
        architecture="random", language_model=decoder, vision=None, image_token_id=None, end_token_ids=frozenset(),
        max_position=spec.max_position, dtype=dtype, device=on, backend=backend, num_parameters=0,
        weight_bytes=weight_bytes(modules), identity=b"",
    )  # fmt: skip


def random_weights(modules: nn.Module, on: Device, quantization: QuantizationConfig | None = None) -> None:
    """Fill all weights with small random numbers, and hand them to the device."""
    generator = torch.Generator(device=on.torch_device).manual_seed(0)
    for parameter in modules.parameters():
        parameter.data.normal_(std=0.02, generator=generator)
    if quantization is not None:
        quantize(modules, quantization)
    arrange_layers(modules, on)


class Streams:
    """Requests that decode together, through the model runner alone."""

    def __init__(self, model: LoadedModel, sizes: Sizes, count: int) -> None:
        self._sizes, self._count = sizes, count
        self._each = -(-(max(sizes.context + 2 * sizes.steps, sizes.prompt) + 1) // BLOCK_SIZE)
        self._runner = ModelRunner(model, (count + 1) * self._each, 0, BLOCK_SIZE, no_grammars)
        self._length = sizes.context
        for number in range(count):
            self.prompt(number, sizes.context)

    def prompt(self, number: int, length: int) -> float:
        """Seconds until a prompt's first token."""
        blocks = list(range(number * self._each, (number + 1) * self._each))
        tokens = [(7 * i + number) % self._sizes.config["vocab_size"] for i in range(length)]
        request = NewRequest(
            str(number), 0, length, length, tokens, blocks,
            SamplingParams(temperature=0, max_tokens=10**6, ignore_eos=True), 0, 10**6, [],
        )  # fmt: skip
        start = time.perf_counter()
        self._runner.submit(SchedulerOutput(new_requests=[request])).result()
        return time.perf_counter() - start

    def forget(self, number: int) -> None:
        """Drop a request."""
        self._runner.submit(SchedulerOutput(finished_request_ids=[str(number)])).result()

    def step(self) -> float:
        """Seconds of a step that gives each request a token."""
        start = time.perf_counter()
        self._submit().result()
        return time.perf_counter() - start

    def steps_ahead(self, count: int) -> float:
        """Seconds of each of so many steps, of which the next one is always submitted before one has ended."""
        start = time.perf_counter()
        running = self._submit()
        for _ in range(count - 1):
            following = self._submit()
            running.result()
            running = following
        running.result()
        return (time.perf_counter() - start) / count

    def _submit(self) -> RunningStep:
        batch = [CachedRequest(str(number), self._length, 1) for number in range(self._count)]
        self._length += 1
        return self._runner.submit(SchedulerOutput(cached_requests=batch))


def no_grammars(grammar: object) -> Any:
    raise NotImplementedError("benchmarks send no grammars")


def _streams(model: LoadedModel, sizes: Sizes, count: int) -> dict[str, Any]:
    streams = Streams(model, sizes, count)
    steps = [streams.step() for _ in range(sizes.steps)]
    # The first steps compile and capture.
    step = statistics.median(steps[len(steps) // 3 :])
    report = {"tokens_s": count / step, "step_ms": step * 1e3, "first_step_ms": steps[0] * 1e3}
    report["tokens_s_one_ahead"] = count / streams.steps_ahead(sizes.steps)
    if count == 1:
        first = []
        for _ in range(3):
            first.append(streams.prompt(1, sizes.prompt))
            streams.forget(1)
        report["first_token_ms"] = min(first) * 1e3
    return report


def trace(device: torch.device, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """A profiler's trace of a few steps of one stream in 4 bits, for chrome://tracing."""
    streams = Streams(random_model(device, sizes, "int4", eager=False), sizes, 1)
    for _ in range(3):
        streams.step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(2):
            streams.step()
        _wait(device)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gpu-trace.json"
    profile.export_chrome_trace(str(path))
    return {"trace": str(path), "events": len(profile.events())}
