"""The interface between the engine and a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from vlmserve.devices.offload import HostBlocks
from vlmserve.kernels.attention import AttentionBackend, LayerCache
from vlmserve.kernels.blocks import Blocks
from vlmserve.kernels.operations import Operations
from vlmserve.kernels.torch_sampling import Draw, DrawLater
from vlmserve.layer_specs import AttentionSpec, CacheType
from vlmserve.layers.step import StepContext
from vlmserve.levels import Levels

CaptureTime = Literal["repeated", "first", "never"]
"""When a device captures the layers of a step: when it comes again, when it first comes, or never."""
AllocateBlocks = Callable[[int, torch.device], Sequence[Blocks]]
"""Allocates that many blocks, or slots of states, of all layers on that device."""
LayerStack = Callable[[Tensor, Sequence[LayerCache], StepContext], Tensor]
"""All layers of a decoder: ``[tokens, hidden_size]`` to the same, over their caches."""


class LayerExecutor(Protocol):
    """Runs the layers of one decoder: one by one, as a fused program, or as a graph."""

    def run(self, layers: LayerStack, x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Tensor:
        """The result of `layers`, which does the same in each call."""
        ...

    def for_part(self) -> LayerExecutor:
        """An executor for some of the layers, in steps that do not run all of them at once: those with features of
        images for single layers."""
        ...


@runtime_checkable
class LaidOutTower(Protocol):
    """A vision tower that reads where patches lie from a layout, which depends on the sizes of images alone."""

    def lay_out(self, shapes: Sequence[tuple[int, ...]]) -> Any:
        """The layout of images whose pixels have these shapes."""
        ...

    def encode_laid_out(self, pixels: Sequence[Tensor], layout: Any) -> Tensor:
        """The embeddings of these images, one behind the other. Reads nothing but pixels, their layout and weights, so
        that a device may repeat it over the same memory."""
        ...


class TowerExecutor(Protocol):
    """Runs a vision tower: call by call, or as a graph."""

    tile_counts: Sequence[int]
    """Numbers of tiles to capture at start, the largest first."""

    def run(self, encode: Callable[[Tensor], Tensor], tiles: Tensor) -> Tensor:
        """The result of `encode` for tiles of images, all of one size. It does the same in each call and computes each
        tile by itself."""
        ...

    def run_images(self, tower: LaidOutTower, pixels: Sequence[Tensor]) -> Tensor | None:
        """The embeddings of images of any size, one behind the other, by a graph; None: there is none for them."""
        ...


class Clock(Protocol):
    """Measures how long the parts of a step take on the device. It starts when it is made."""

    def mark(self) -> None:
        """A part has ended and the next one begins."""
        ...

    def seconds(self) -> list[float]:
        """Seconds of each part that has ended. May wait for the device."""
        ...


class Device(Operations, Protocol):
    """One device and all that depends on it. An object serves one loaded model.

    torch_device: where tensors lie. kernels: what computes, for people: "torch" or an instruction set.
    keeps_packed: whether weights that a file holds in few bits stay packed unless the settings say otherwise.
    chooses_experts: whether it chooses a step's experts without the host, so that executors may hold such layers.
    overcommits: whether empty tensors take memory only once they are written.
    mapped_bytes: of weights in mapped files, which the system counts as free memory.
    images_per_step: images that go through the vision tower in one step, unless the settings say. stage_products:
    multiplications of the vision tower that are too few to be worth a stage, and stage_rows: rows of a stage or of a
    part of it, see `StageBudget`.
    padding_blocks: blocks of the KV cache that batches' padding rows need: 1 where `padded_rows` pads, else 0.
    """

    torch_device: torch.device
    kernels: str
    keeps_packed: bool
    chooses_experts: bool
    overcommits: bool
    mapped_bytes: int
    images_per_step: int
    stage_products: int
    stage_rows: int
    padding_blocks: int

    @property
    def gpu_uuid(self) -> str | None:
        """NVML's name of the device; None for what NVML does not know."""
        ...

    @property
    def draw(self) -> Draw:
        """Draws tokens."""
        ...

    @property
    def draw_later(self) -> DrawLater | None:
        """Draws tokens that stay on the device; None: a step waits for its tokens, and the next one for the step."""
        ...

    def download(self, tensor: Tensor) -> Callable[[], list[int]]:
        """Begin to copy integers to the host; what is returned waits for them."""
        ...

    def attention(
        self,
        layers: Sequence[AttentionSpec],
        dtype: torch.dtype,
        *,
        cache_type: CacheType = "auto",
    ) -> AttentionBackend:
        """The backend that serves all of these layers."""
        ...

    def executor(self) -> LayerExecutor:
        """An executor for the layers of another decoder."""
        ...

    def tower_executor(self) -> TowerExecutor:
        """An executor for the vision tower."""
        ...

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Arrays on the device, in one transfer; valid until the next one. They may share the arrays' memory, which
        must not change before the step has ended."""
        ...

    def upload_pixels(self, pixels: np.ndarray, dtype: torch.dtype, levels: Levels | None = None) -> Tensor:
        """An image's numbers on the device, in another type; a copy of them. levels: what becomes of uint8 ones."""
        ...

    def host_blocks(self, layers: Sequence[Blocks], count: int, allocate: AllocateBlocks) -> HostBlocks:
        """Make `count` blocks in host memory for copies of blocks, or slots of states, of `layers`."""
        ...

    def padded_rows(self, num_rows: int, num_decodes: int) -> int | None:
        """To how many rows a step of so many, among them those of decodes, is padded so that it may be repeated; None:
        the device repeats no such steps."""
        ...

    def enforce_eager(self) -> None:
        """Capture no graphs from here on."""
        ...

    def decode_sizes(self, most: int) -> list[int]:
        """Sizes of batches of up to `most` decodes to capture at start, the largest one first."""
        ...

    def capturing(self, time: CaptureTime) -> AbstractContextManager[None]:
        """A context in which steps are captured at this time. Those that are captured at "first" are never dropped."""
        ...

    def graph_bytes(self, run: Callable[[], None]) -> int:
        """Bytes that graphs of `run` take beside all other memory; 0: the device captures none."""
        ...

    def logits_buffer(self, rows: int, vocab_size: int) -> Tensor | None:
        """float32 ``[rows, vocab_size]`` for the logits of a step, the same memory in each; None: fresh memory is as
        good."""
        ...

    def clock(self) -> Clock:
        """A clock that starts now."""
        ...

    def work_clock(self) -> Clock:
        """A clock that starts now and, where it can, counts no time in which other processes computed."""
        ...

    def cache_budget(self, fraction: float, largest_step: Callable[[], None], reserved: int = 0) -> int:
        """Bytes that the KV cache may take, once the model is loaded; may be negative.

        fraction: `memory_fraction` of the settings. largest_step: computes what a step computes at most; a device that
        can tell runs it to measure the memory of activations. reserved: bytes that other caches will take there.
        """
        ...

    def expected_cache(self, fraction: float, weights: int) -> int:
        """As `cache_budget`, before so many bytes of weights are loaded; what a step takes is not counted."""
        ...


class EagerExecutor:
    """Runs layers one by one. A `LayerExecutor`."""

    def run(self, layers: LayerStack, x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Tensor:
        return layers(x, caches, step)

    def for_part(self) -> LayerExecutor:
        return self


class EagerTower:
    """Runs towers call by call. A `TowerExecutor`."""

    tile_counts: Sequence[int] = ()

    def run_images(self, tower: LaidOutTower, pixels: Sequence[Tensor]) -> Tensor | None:
        return None

    def run(self, encode: Callable[[Tensor], Tensor], tiles: Tensor) -> Tensor:
        return encode(tiles)


class HostClock:
    """For devices that compute synchronously. A `Clock`."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """now: returns the time in seconds."""
        self._now = now
        self._marks = [now()]

    def mark(self) -> None:
        self._marks.append(self._now())

    def seconds(self) -> list[float]:
        return [after - before for before, after in pairwise(self._marks)]
