"""Measures a model in the real engine, relative to this machine's measured limits."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from torch import nn

from vlmserve.devices.choice import type_for_torch
from vlmserve.engine.engine import Engine
from vlmserve.engine.loading import load
from vlmserve.errors import ConfigurationError
from vlmserve.layers.linear import Embedding, Weight
from vlmserve.models.decoder import Decoder
from vlmserve.models.protocols import LoadedModel
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.types import EngineRequest, ImageInput, Prompt, SamplingParams

WARM_UP_STEPS = 3
LIMIT_REPEATS = 7
PRODUCT_SIZE = 2048


class Limits(msgspec.Struct, frozen=True):
    bytes_per_s: float
    flops_per_s: float


class Figure(msgspec.Struct, frozen=True):
    weights: str
    kernels: str
    """"torch" or an instruction set."""
    what: str
    """"prefill", "decode" or "vision"."""
    at_once: int
    rate: float
    """Tokens/s or images/s."""
    milliseconds: float
    of_bandwidth: float
    """Fraction of the memory bandwidth, from reading weights, keys and values."""
    of_flops: float
    """Fraction of the arithmetic limit. In vision towers, attention's own MACs are not counted."""


class Report(msgspec.Struct, frozen=True):
    model: str
    device: str
    dtype: str
    threads: int
    torch: str
    num_parameters: int
    limits: Limits
    figures: list[Figure]


def memory_bandwidth(device: torch.device, num_bytes: int = 2**28) -> float:
    """Bytes/s of summing a large tensor, best of a few runs."""
    data = torch.ones(num_bytes // 4, device=device)
    return data.nbytes / _best(lambda: data.sum().item())


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matmul, best of a few runs."""
    matrix = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, device=device, dtype=dtype)
    return 2 * PRODUCT_SIZE**3 / _best(lambda: (matrix @ matrix)[0, 0].item())


def measure_limits(model: LoadedModel) -> Limits:
    """Measures in the type that the device computes."""
    device = model.device.torch_device
    return Limits(memory_bandwidth(device), product_rate(device, type_for_torch(device, model.dtype)))


def _best(work: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(LIMIT_REPEATS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def bench(
    config: EngineConfig,
    folder: Path,
    *,
    schemes: Sequence[str] = ("none", "int8", "int4"),
    kernels: Sequence[str] = (),
    at_once: Sequence[int] = (1, 16, 64),
    prompt_len: int = 200,
    long_prompt_len: int = 2000,
    steps: int = 16,
    progress: Callable[[str], None] = lambda what: None,
) -> Report:
    """Measure a checkpoint with each quantization scheme and kind of kernels.

    kernels: "torch" and instruction sets (default: by the settings). prompt_len: cached tokens per decoding request.
    long_prompt_len: tokens of the prefill. steps: measured per kind; medians are reported. Raises ConfigurationError
    for unsupported combinations.
    """
    figures: list[Figure] = []
    limits = info = None
    for scheme, kind in itertools.product(schemes, kernels or (config.kernels,)):
        progress(f"{scheme}: loading")
        # A time limit would end the first requests before the last begin.
        plain = {"enable_prefix_caching": False, "speculation": "off", "step_seconds": math.inf}
        settings = config.model_copy(update={"quantize": scheme, "kernels": kind, **plain})
        model = load(settings, folder)
        if model.cross is not None:
            raise ConfigurationError("bench measures models that read their images as part of the prompt")
        # Let all schemes compute in the same type.
        config = config.model_copy(update={"dtype": str(model.dtype).removeprefix("torch.")})
        limits = limits or measure_limits(model)
        engine = Engine.from_model(settings, model)
        info = engine.info
        label = f"{scheme}, {kind}"
        rounds = Rounds(engine, model, limits, scheme)
        longest = min(long_prompt_len, info.max_prompt_len - 1)
        progress(f"{label}: a prompt of {longest} tokens")
        figures.append(rounds.prefill(longest))
        for count in at_once:
            progress(f"{label}: {count} at once")
            answer = answer_length(settings, count, prompt_len, steps)
            figures.append(rounds.decode(count, min(prompt_len, longest - answer), answer))
        if model.vision is not None:
            progress(f"{label}: an image")
            figures.append(rounds.vision(noise_image(folder)))
    if limits is None or info is None:
        raise ValueError("nothing to measure: no schemes")
    return Report(
        info.name, info.device, info.dtype, torch.get_num_threads(), str(torch.__version__), info.num_parameters,
        limits, figures,
    )  # fmt: skip


def answer_length(config: EngineConfig, count: int, prompt_len: int, steps: int) -> int:
    """Tokens per answer, so that `count` requests decode together for `steps` steps."""
    # While others prefill, each decoding request takes a token of the budget.
    prompt_steps = math.ceil(count * prompt_len / max(config.max_num_batched_tokens - count, 1))
    return prompt_steps + WARM_UP_STEPS + steps


class Rounds:
    def __init__(self, engine: Engine, model: LoadedModel, limits: Limits, scheme: str) -> None:
        """scheme: for the figures."""
        self._engine, self._model, self._limits, self._scheme = engine, model, limits, scheme
        self._kernels = model.device.kernels
        self._random = random.Random(0)
        language_model = model.language_model
        assert isinstance(language_model, Decoder)
        self._weight_bytes, products = _sizes(language_model)
        # The output head computes only rows whose next token is sampled.
        head = language_model.lm_head or language_model.embed_tokens
        assert isinstance(head, Weight)
        self._head_products = head.in_features * head.out_features
        self._layer_products = products - self._head_products
        # MACs of query times key, and of weight times value.
        self._pair_products = 2 * sum(spec.num_heads * spec.head_size for spec in language_model.spec.attention)
        self._cache_bytes = language_model.cache_bytes(16)

    def prefill(self, length: int) -> Figure:
        """Prefill one long prompt in steps of the token budget."""
        seconds = []
        for _ in range(3):
            self._add(1, length, 1)
            started = time.perf_counter()
            for _ in self._outputs():
                pass
            seconds.append(time.perf_counter() - started)
        pairs = length * (length + 1) // 2
        return self._figure("prefill", 1, length, statistics.median(seconds), self._weight_bytes, length, pairs)

    def decode(self, count: int, length: int, answer: int) -> Figure:
        """Measure steps in which `count` requests decode. length, answer: tokens per request."""
        self._add(count, length, answer)
        seconds = []
        before = time.perf_counter()
        for outputs in self._outputs():
            now = time.perf_counter()
            if outputs == count:
                seconds.append(now - before)
            before = now
        moved = self._weight_bytes + count * self._cache_bytes.read(length)
        pairs = count * length
        return self._figure("decode", count, count, statistics.median(seconds[WARM_UP_STEPS:]), moved, count, pairs)

    def vision(self, image: ImageInput) -> Figure:
        """Encode one image at a time."""
        vision = self._model.vision
        assert vision is not None
        assert isinstance(vision, nn.Module)
        pixels = self._model.device.upload_pixels(image.pixels, self._model.dtype, image.levels)
        seconds = []
        with torch.inference_mode():
            for _ in range(3):
                started = time.perf_counter()
                vision.encode([pixels], [image.tiling])[0][0, 0].item()
                seconds.append(time.perf_counter() - started)
        num_bytes, products = _sizes(vision)
        seconds_each = statistics.median(seconds)
        tokens = image.num_embeddings
        return Figure(
            self._scheme, self._kernels, "vision", 1, 1 / seconds_each, 1e3 * seconds_each,
            num_bytes / seconds_each / self._limits.bytes_per_s,
            2 * products * tokens / seconds_each / self._limits.flops_per_s,
        )  # fmt: skip

    def _add(self, count: int, length: int, answer: int) -> None:
        vocab_size = self._engine.info.vocab_size
        for number in range(count):
            tokens = [self._random.randrange(vocab_size // 4, vocab_size // 2) for _ in range(length)]
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
            self._engine.add(EngineRequest(str(number), Prompt(tokens), params))

    def _outputs(self) -> Iterator[int]:
        while self._engine.has_work():
            yield len(self._engine.step())

    def _figure(
        self, what: str, at_once: int, units: int, seconds: float, moved: float, tokens: int, pairs: int
    ) -> Figure:
        """pairs: query-key pairs in attention."""
        products = self._layer_products * tokens + self._head_products * at_once + self._pair_products * pairs
        return Figure(
            self._scheme, self._kernels, what, at_once, units / seconds, 1e3 * seconds,
            moved / seconds / self._limits.bytes_per_s,
            2 * products / seconds / self._limits.flops_per_s,
        )  # fmt: skip


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Bytes of weights that a step reads, and MACs per token."""
    num_bytes = products = 0
    for module in model.modules():
        if isinstance(module, Weight):
            num_bytes += module.num_bytes
            products += module.in_features * module.out_features
        elif not isinstance(module, Embedding):
            num_bytes += sum(parameter.nbytes for parameter in module.parameters(recurse=False))
    return num_bytes, products


def noise_image(folder: Path) -> ImageInput:
    """Coloured noise, preprocessed for the checkpoint's tower."""
    from PIL import Image

    from vlmserve.frontend.requests import RequestPreparer

    noise = Image.frombytes("RGB", (64, 64), random.Random(0).randbytes(64 * 64 * 3)).resize((336, 336))
    part = {"type": "image", "image": noise}
    preparer = RequestPreparer(folder, read_settings(MediaConfig, {}))
    return preparer.chat([{"role": "user", "content": [part]}], allow_local=True).images[0].image
