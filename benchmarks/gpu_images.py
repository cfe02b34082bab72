"""Vision-language models of published shapes with random weights, through the model runner alone: a stage of
`benchmarks.gpu`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_decode import four_bits, no_grammars, random_weights
from benchmarks.gpu_stages import BLOCK_SIZE, Measured, Sizes
from benchmarks.gpu_timing import release, wait
from benchmarks.gpu_work import prompt_work, tower_work
from vlmserve.devices.choice import open_device
from vlmserve.families.registry import decoder_spec
from vlmserve.levels import Levels
from vlmserve.models.decoder import Decoder
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.registry import Description
from vlmserve.quant.memory import weight_bytes
from vlmserve.runner.kv import PoolSizes
from vlmserve.runner.runner import ModelRunner
from vlmserve.steps import NewRequest, SchedulerOutput
from vlmserve.types import ImageInput, ImagePlacement, SamplingParams

Config = dict[str, Any]
LEVELS = Levels(1 / 255, (0.5,) * 3, (0.25,) * 3)
"""Of pixels; any will do."""
TEXT_TOKENS = 16
"""Before an image, and behind it."""
AT_ONCE = 8
"""Images and requests of a step, beside steps of one."""


def _llava(text: Config, vision: Config) -> Config:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 5,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, **text},
        "vision_config": {"model_type": "clip_vision_model", "hidden_act": "quick_gelu", **vision},
    }


def _qwen(text: Config, vision: Config) -> Config:
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": 5,
        "video_token_id": 6,
        "vision_start_token_id": 7,
        "text_config": {"model_type": "qwen2_5_vl_text", "max_position_embeddings": 32768, "rope_theta": 1e6, **text},
        "vision_config": {
            "model_type": "qwen2_5_vl", "hidden_act": "silu", "in_channels": 3, "spatial_merge_size": 2,
            "temporal_patch_size": 2, **vision,
        },
    }  # fmt: skip


def _layers(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> Config:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
    }  # fmt: skip


def _tower(hidden: int, inner: int, layers: int, heads: int, image_size: int, patch_size: int) -> Config:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "image_size": image_size, "patch_size": patch_size,
    }  # fmt: skip


def _window_tower(hidden: int, inner: int, depth: int, heads: int, patch: int, window: int, out: int) -> Config:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "depth": depth, "num_heads": heads, "patch_size": patch,
        "window_size": window, "fullatt_block_indexes": list(range(depth // 4 - 1, depth, depth // 4)),
        "out_hidden_size": out,
    }  # fmt: skip


def _multimodal(*sections: int) -> Config:
    return {"rope_scaling": {"type": "mrope", "mrope_section": list(sections)}}


SHAPES: dict[str, tuple[Config, int]] = {
    "LLaVA-1.5-7B": (_llava(_layers(4096, 11008, 32, 32, 32, 32064), _tower(1024, 4096, 24, 16, 336, 14)), 336),
    "Qwen2.5-VL-7B": (
        _qwen(
            _layers(3584, 18944, 28, 28, 4, 152064) | _multimodal(16, 24, 24),
            _window_tower(1280, 3420, 32, 16, 14, 112, 3584),
        ),
        616,
    ),
}
"""Configurations, and the width and height of images in pixels."""
PAGES = {"Qwen2.5-VL-7B": 1008}
"""Width and height of an image of a page, as far as that model takes pixels by default."""
TINY_SHAPES: dict[str, tuple[Config, int]] = {
    "LLaVA-1.5-7B": (_llava(_layers(64, 128, 2, 4, 2, 256), _tower(32, 64, 2, 2, 16, 4)), 16),
    "Qwen2.5-VL-7B": (
        _qwen(_layers(64, 128, 2, 4, 2, 256) | _multimodal(2, 3, 3), _window_tower(32, 64, 4, 2, 4, 16, 64)),
        40,
    ),
}
TINY_PAGES = {"Qwen2.5-VL-7B": 80}
PAGE, FOUR_BITS = ", page", ", 4 bits"
"""Of which only a first and a second look are measured."""
MOST_LOOKS = 10
"""Repeats of those."""


def images(device: torch.device, sizes: Sizes, folder: Path) -> Measured:
    """Images a second of the tower, requests a second that bring an image each, and the time to the first token of a
    request with a new image, and with one whose blocks are cached; what tower and prompts have to read and to
    multiply. Those looks also at a page, and with language models in 4 bits, which read less for the second one."""
    shapes, pages = (TINY_SHAPES, TINY_PAGES) if sizes.dtype == torch.float32 else (SHAPES, PAGES)
    few = min(sizes.repeats, MOST_LOOKS)
    for name, (config, size) in shapes.items():
        model = _random_model(device, sizes, config)
        yield name, _Looks(model, size).measure(sizes.repeats)
        if name in pages:
            yield name + PAGE, _Looks(model, pages[name]).looks(few)
        del model
        release(device)
    for name, (config, size) in shapes.items():
        yield name + FOUR_BITS, _Looks(_random_model(device, sizes, config, "int4"), size).looks(few)
        release(device)


def _random_model(device: torch.device, sizes: Sizes, config: Config, scheme: str = "none") -> LoadedModel:
    on, dtype = open_device(device, "auto", sizes.dtype, automatic=False)
    description = Description.of(Path(), config)
    assert description.vision is not None
    spec = replace(decoder_spec(description.text_config), bidirectional=description.vision.bidirectional)
    backend = on.attention(spec.attention, dtype)
    modules, decoder, vision, _ = description.build(spec, backend, on.executor(), dtype=dtype, device=device)
    random_weights(modules, on, None if scheme == "none" else four_bits(spec.hidden_size))
    return LoadedModel(
        architecture=description.architecture, language_model=decoder, vision=vision, image_token_id=5,
        end_token_ids=frozenset(),
        max_position=spec.max_position, dtype=dtype, device=on, backend=backend, num_parameters=0,
        weight_bytes=weight_bytes(modules), identity=b"",
    )  # fmt: skip


class _Looks:
    """Requests about images of one size."""

    def __init__(self, model: LoadedModel, size: int) -> None:
        assert model.vision is not None
        assert model.vision.example_shape is not None
        frames, channels, *_ = model.vision.example_shape
        self._pixels = np.random.default_rng(0).integers(0, 256, (frames, channels, size, size), np.uint8)
        self._model, self._number = model, 0
        with torch.inference_mode():
            pixels = model.device.upload_pixels(self._pixels, model.dtype, LEVELS)
            [embeddings] = model.vision.encode([pixels], [None])
        self._count = len(embeddings)
        side = int(self._count**0.5)
        self._grid = (1, side, side) if "Qwen" in model.architecture else None
        self._length = self._count + 2 * TEXT_TOKENS
        self._each = -(-(self._length + 1) // BLOCK_SIZE)
        self._runner = ModelRunner(model, PoolSizes(BLOCK_SIZE, AT_ONCE * self._each), no_grammars)

    def measure(self, repeats: int) -> dict[str, Any]:
        """Medians."""
        decoder = self._model.language_model
        assert isinstance(decoder, Decoder)
        report: dict[str, Any] = {}
        for count in (1, AT_ONCE):
            report[f"work_{count}"] = {
                "tower": tower_work(self._model, self._pixels.shape, count).report(),
                "prompt": prompt_work(decoder, self._length, count).report(),
            }
            report[f"images_s_{count}"] = count / self._median(lambda n=count: self._step(n, requests=False), repeats)  # type: ignore[misc]
            report[f"requests_s_{count}"] = count / self._median(lambda n=count: self._step(n), repeats)  # type: ignore[misc]
        return report | self.looks(repeats)

    def looks(self, repeats: int) -> dict[str, Any]:
        """Medians of first and second looks at one image."""
        first = self._median(lambda: self._step(1), repeats)
        # The blocks up to the image's end are there already.
        cached = -(-(TEXT_TOKENS + self._count) // BLOCK_SIZE) * BLOCK_SIZE
        second = self._median(lambda: self._step(1, cached=cached), repeats)
        return {"embeddings": self._count, "first_look_ms": first * 1e3, "second_look_ms": second * 1e3}

    @staticmethod
    def _median(step: Any, repeats: int) -> float:
        return float(np.median([step() for _ in range(repeats + 1)][1:]))

    def _step(self, count: int, *, requests: bool = True, cached: int = 0) -> float:
        """Seconds of a step with so many images and requests, and then without them again. cached: leading tokens of
        the requests that are computed, their images' among them."""
        keys = [(self._number + number).to_bytes(32, "big") for number in range(count)]
        self._number += count
        new = [ImageInput(key, self._pixels, self._count, self._grid, levels=LEVELS) for key in keys]
        step = SchedulerOutput()
        if not cached:
            step.images_to_encode = new
        if requests:
            step.new_requests = [self._request(number, key, cached) for number, key in enumerate(keys)]
        start = time.perf_counter()
        self._runner.submit(step).result()
        wait(self._model.device.torch_device)
        taken = time.perf_counter() - start
        ended = SchedulerOutput(embeddings_to_evict=[] if cached else keys)
        ended.finished_request_ids = [str(number) for number in range(count)] if requests else []
        self._runner.submit(ended).result()
        return taken

    def _request(self, number: int, key: bytes, cached: int) -> NewRequest:
        blocks = list(range(number * self._each, (number + 1) * self._each))
        tokens = [9 + i % 50 for i in range(self._length)]
        return NewRequest(
            str(number), cached, self._length - cached, self._length, tokens, [blocks],
            SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), 0, self._length + 2, [],
            images=(ImagePlacement(key, TEXT_TOKENS, self._count, self._grid),),
        )  # fmt: skip
