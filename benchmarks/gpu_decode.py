"""The stages of `benchmarks.gpu` that decode: through the model runner, with random weights."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from benchmarks.gpu_stages import BLOCK_SIZE, Measured, Sizes, switched
from benchmarks.gpu_timing import release, wait
from benchmarks.gpu_work import decode_work
from vlmserve.adapters.lora import Adapter
from vlmserve.adapters.mixture import Mixture
from vlmserve.devices.choice import open_device
from vlmserve.devices.cuda import TritonDevice
from vlmserve.devices.device import Device, EagerExecutor, LayerExecutor
from vlmserve.families.registry import decoder_spec
from vlmserve.kernels.adapters import Change, LowRank
from vlmserve.layers.layer import arrange_layers
from vlmserve.layers.linear import MergedLinear, Weight
from vlmserve.models.adaptable import AdaptableModel
from vlmserve.models.decoder import Decoder
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.weights import Checkpoint
from vlmserve.quant.memory import weight_bytes
from vlmserve.quant.model import quantize
from vlmserve.runner.adapters import RunnerAdapters
from vlmserve.runner.kv import PoolSizes
from vlmserve.runner.runner import ModelRunner, RunningStep
from vlmserve.settings.quantization import QuantizationConfig
from vlmserve.steps import AdapterLoad, CachedRequest, NewRequest, SchedulerOutput
from vlmserve.types import SamplingParams

ADAPTER, RANK = b"random", 16
"""The digest of an adapter, and its rank."""
SLEEP_CYCLES = 10**8
"""Of a GPU's clock: about 50 milliseconds, longer than a host takes for a step."""
BEHIND, LAUNCHED_NORMS, LAYER_BY_LAYER = ", one kernel behind the other", ", norms by launches", ", layer by layer"
FIRST_STEPS = 3
"""Of those that are submitted one ahead, which do not count."""
CAPTURED_STEPS = 2
"""Steps that are captured before any is measured."""
STEPS_BESIDE = 8
"""In which a prompt is computed beside decodes."""
DEVICE_STEPS = 3
"""Of which the device's own time is measured."""


def decode(device: torch.device, sizes: Sizes, folder: Path) -> Measured:
    """Tokens a second of decodes and the time to a prompt's first token, in plain weights and in 4 bits, as the device
    runs them, with an adapter, with each kernel launched behind the end of the one before it, with launches for norms,
    and layer by layer; what a step has to read and to multiply beside adapters, and how long the device has to do."""
    for how, kernels in DECODES.items():
        for scheme in ("none", "int4"):
            model = random_model(device, sizes, scheme, eager=how == LAYER_BY_LAYER)
            with kernels():
                for streams in sizes.streams[:1] if how else sizes.streams:
                    yield f"{scheme}, {streams} streams{how}", _streams(model, sizes, streams)
                for streams in () if how else sizes.streams[:1]:
                    yield f"{scheme}, {streams} streams, LoRA", _streams(model, sizes, streams, random_adapter(model))
            del model
            release(device)


def of_triton(module: str, kind: str, **switch: bool) -> AbstractContextManager[None]:
    """A switch of one of the kernels' classes, where Triton is there."""
    if importlib.util.find_spec("triton") is None:
        return nullcontext()
    return switched(getattr(importlib.import_module(f"vlmserve.kernels.triton.{module}"), kind), **switch)


DECODES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "": nullcontext,
    BEHIND: partial(of_triton, "launching", "Kernel", overlaps=False),
    LAUNCHED_NORMS: partial(of_triton, "products", "TritonLinearKernel", defers_norms=False),
    LAYER_BY_LAYER: nullcontext,
}
"""How streams are decoded, and what has them decoded so: no kernel is launched before the one before it has ended, see
`kernels.triton.dependent`; each norm takes a launch of its own, see `DeferredNorm`."""


def random_model(device: torch.device, sizes: Sizes, scheme: str, *, eager: bool) -> LoadedModel:
    """A model of the config's shape with random weights. eager: its layers run one by one."""
    on, dtype = open_device(device, "auto", sizes.dtype, automatic=False)
    spec = decoder_spec(sizes.config)
    backend = on.attention(spec.attention, dtype)
    executor: LayerExecutor = EagerExecutor() if eager else on.executor()
    modules = nn.Module()
    modules.language_model = decoder = Decoder(spec, backend, executor, dtype=dtype, device=device)
    random_weights(modules, on, None if scheme == "none" else four_bits(spec.hidden_size))
    return LoadedModel(
        architecture="random", language_model=decoder, vision=None, image_token_id=None, end_token_ids=frozenset(),
        max_position=spec.max_position, dtype=dtype, device=on, backend=backend, num_parameters=0,
        weight_bytes=weight_bytes(modules), identity=b"",
    )  # fmt: skip


def four_bits(hidden_size: int) -> QuantizationConfig:
    """Groups of 128, or of 32 where inputs are not whole groups."""
    return QuantizationConfig(scheme="int4", group_size=128 if hidden_size % 128 == 0 else 32)


def random_weights(modules: nn.Module, on: Device, quantization: QuantizationConfig | None = None) -> None:
    """Fill all weights with small random numbers, and hand them to the device. quantization: of the language model."""
    generator = torch.Generator(device=on.torch_device).manual_seed(0)
    for parameter in modules.parameters():
        parameter.data.normal_(std=0.02, generator=generator)
    if quantization is not None:
        quantize(modules, quantization)
    arrange_layers(modules, on)


def random_adapter(model: LoadedModel, *, loaded: bool = True, mixed: bool = False) -> RunnerAdapters:
    """A slot of a random model, and in it an adapter that changes all products of its layers. loaded: False: a step is
    to load it. mixed: it is one of X-LoRA."""
    modules, no_checkpoint = nn.Module(), cast(Checkpoint, None)
    modules.language_model = cast(nn.Module, model.language_model)
    device = model.device.torch_device
    adaptable = AdaptableModel(modules, no_checkpoint, (), None, model.dtype, device)
    mixture = Mixture.constant(model.language_model.hidden_size, device) if mixed else None
    columns = torch.zeros(RANK, dtype=torch.int64, device=device) if mixed else None
    adapter = Adapter(ADAPTER, mixture=mixture)
    slots = RunnerAdapters(replace(model, adaptable=adaptable), 1, lambda digest: adapter, RANK)
    for path, module in modules.named_modules():
        if isinstance(module, Weight) and ".layers." in path:
            ends = itertools.accumulate(
                module.parts.values() if isinstance(module, MergedLinear) else [module.out_features]
            )
            parts = [
                LowRank(
                    torch.randn(RANK, module.in_features, device=device) / module.in_features**0.5,
                    torch.randn(end - start, RANK, device=device) / 100,
                    start,
                    columns,
                )
                for start, end in itertools.pairwise([0, *ends])
            ]
            adapter.layers[path] = module.prepare(Change(tuple(parts)))
    if loaded:
        slots.load([AdapterLoad(0, ADAPTER)])
    return slots


class Streams:
    """Requests that decode together, through the model runner alone. adapters: see `random_adapter`."""

    def __init__(self, model: LoadedModel, sizes: Sizes, count: int, adapters: RunnerAdapters | None = None) -> None:
        self._adapter = b"" if adapters is None else ADAPTER
        self._sizes, self._count, self._device = sizes, count, model.device.torch_device
        longest = sizes.context + CAPTURED_STEPS + 2 * sizes.steps + FIRST_STEPS + DEVICE_STEPS + STEPS_BESIDE
        self._each = -(-(max(longest, sizes.prompt) + 1) // BLOCK_SIZE)
        self._runner = ModelRunner(model, PoolSizes(BLOCK_SIZE, (count + 1) * self._each), no_grammars, adapters)
        self._length = sizes.context
        for number in range(count):
            self.prompt(number, sizes.context)
        with model.device.capturing("first"):
            self.steps_ahead(CAPTURED_STEPS)

    def prompt(self, number: int, length: int) -> float:
        """Seconds until a prompt's first token."""
        request = self._request(number, length)
        start = time.perf_counter()
        self._runner.submit(SchedulerOutput(new_requests=[request])).result()
        return time.perf_counter() - start

    def prompt_beside(self, length: int) -> float:
        """Seconds of a step that gives each request a token, and another one, which is forgotten, its first."""
        request, batch = self._request(self._count, length), self._decodes()
        start = time.perf_counter()
        self._runner.submit(SchedulerOutput(new_requests=[request], cached_requests=batch)).result()
        taken = time.perf_counter() - start
        self.forget(self._count)
        return taken

    def _request(self, number: int, length: int) -> NewRequest:
        blocks = list(range(number * self._each, (number + 1) * self._each))
        tokens = [(7 * i + number) % self._sizes.config["vocab_size"] for i in range(length)]
        return NewRequest(
            str(number), 0, length, length, tokens, [blocks],
            SamplingParams(temperature=0, max_tokens=10**6, ignore_eos=True), 0, 10**6, [], adapter=self._adapter,
        )  # fmt: skip

    def forget(self, number: int) -> None:
        """Drop a request."""
        self._runner.submit(SchedulerOutput(finished_request_ids=[str(number)])).result()

    @property
    def length(self) -> int:
        """Tokens of each request, whose keys and values the next step reads."""
        return self._length

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

    def device_seconds(self) -> float:
        """Seconds for which the device computes a step. It has something else to do until the whole step is there, so
        that it never waits for the host."""
        device = self._device
        if device.type == "cuda":
            torch.cuda._sleep(SLEEP_CYCLES)
        run = self._submit().result().timings
        return run.transfer + run.vision + run.build + run.model + run.sample

    def _submit(self) -> RunningStep:
        return self._runner.submit(SchedulerOutput(cached_requests=self._decodes()))

    def _decodes(self) -> list[CachedRequest]:
        self._length += 1
        return [CachedRequest(str(number), self._length - 1, 1) for number in range(self._count)]


def no_grammars(grammar: object) -> Any:
    raise NotImplementedError("benchmarks send no grammars")


def _streams(model: LoadedModel, sizes: Sizes, count: int, adapters: RunnerAdapters | None = None) -> dict[str, Any]:
    streams = Streams(model, sizes, count, adapters)
    steps = [streams.step() for _ in range(sizes.steps)]
    # The first steps compile what only they launch.
    step = statistics.median(steps[len(steps) // 3 :])
    report: dict[str, Any] = {"tokens_s": count / step, "step_ms": step * 1e3, "first_step_ms": steps[0] * 1e3}
    assert isinstance(model.language_model, Decoder)
    report["work"] = decode_work(
        model.language_model, count, streams.length + (sizes.steps - 1) / 2, BLOCK_SIZE
    ).report()
    # What only such steps launch is loaded with the first of them.
    streams.steps_ahead(FIRST_STEPS)
    report["tokens_s_one_ahead"] = count / streams.steps_ahead(sizes.steps)
    report["device_ms"] = statistics.median(streams.device_seconds() for _ in range(DEVICE_STEPS)) * 1e3
    if count > 1:
        beside = [streams.prompt_beside(sizes.prompt // 10) for _ in range(STEPS_BESIDE)]
        report["prompt_beside_ms"] = statistics.median(beside[2:]) * 1e3
        report["first_prompt_beside_ms"] = beside[0] * 1e3
    if count == 1:
        first = []
        for _ in range(6):
            first.append(streams.prompt(1, sizes.prompt))
            streams.forget(1)
        report["first_token_ms"] = statistics.median(first[1:]) * 1e3
    return report


def prompts(device: torch.device, sizes: Sizes, folder: Path) -> Measured:
    """Milliseconds of prompts alone and beside decodes, each kernel launched by the host, and as graphs: the first one,
    the second one, which is captured, and the median of the others."""
    for captured in (False, True):
        with switched(TritonDevice, captures_repeats=captured):
            model = random_model(device, sizes, "int4", eager=False)
        for count in sizes.streams[:2]:
            streams = Streams(model, sizes, count)
            for length in (sizes.prompt // 30 + 2, sizes.prompt // 4, sizes.prompt):
                alone = [_alone(streams, count, length) for _ in range(STEPS_BESIDE)]
                beside = [streams.prompt_beside(length) for _ in range(STEPS_BESIDE)]
                name = f"{count} streams, prompt of {length}{', captured' if captured else ''}"
                yield name, {"alone_ms": _first_and_usual(alone), "beside_ms": _first_and_usual(beside)}
        del model, streams
        release(device)


def _alone(streams: Streams, number: int, length: int) -> float:
    taken = streams.prompt(number, length)
    streams.forget(number)
    return taken


def _first_and_usual(seconds: list[float]) -> list[float]:
    return [1e3 * one for one in (*seconds[:2], statistics.median(seconds[2:]))]


def trace(device: torch.device, sizes: Sizes, folder: Path) -> Measured:
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
        wait(device)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gpu-trace.json"
    profile.export_chrome_trace(str(path))
    yield "trace", str(path)
    yield "events", len(profile.events())
