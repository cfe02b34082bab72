"""The base class of devices, which runs torch's operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from vlmserve.devices.offload import HostBlocks, PlainBlocks
from vlmserve.devices.pixels import Normalizer
from vlmserve.kernels import torch_sampling
from vlmserve.kernels.attention import AttentionBackend, LayerCache
from vlmserve.kernels.blocks import Blocks
from vlmserve.kernels.operations import AnyWeight, Epilogue, LinearKernel, Operations, Table
from vlmserve.kernels.torch_products import torch_linear, torch_table
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.kernels.torch_sampling import Draw, DrawLater
from vlmserve.layer_specs import AttentionSpec, CacheType
from vlmserve.layers.step import StepContext
from vlmserve.levels import Levels

CaptureTime = Literal["repeated", "first", "never"]
"""When a device captures a step's layers: when the step repeats, the first time, or never."""
AllocateBlocks = Callable[[int, torch.device], Sequence[Blocks]]
"""Allocates a number of blocks, or of state slots, of all layers on a device."""
LayerStack = Callable[[Tensor, Sequence[LayerCache], StepContext], Tensor]
"""All layers of a decoder: ``[tokens, hidden_size]`` to the same shape, over their caches."""


class LayerExecutor(Protocol):
    def run(self, layers: LayerStack, x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Tensor:
        """`layers` must do the same in each call."""
        ...

    def for_part(self) -> LayerExecutor:
        """For steps that run some layers at a time, as images may add features to layers."""
        ...


class TowerExecutor(Protocol):
    tile_counts: Sequence[int]
    """Numbers of tiles to capture at start, largest first."""

    def run(self, encode: Callable[[Tensor], Tensor], tiles: Tensor) -> Tensor:
        """`encode` must do the same in each call and compute tiles separately."""
        ...


class Clock(Protocol):
    """Seconds of a step's parts, from creation on."""

    def mark(self) -> None:
        """End a part and begin the next."""
        ...

    def seconds(self) -> list[float]:
        """May wait for the device."""
        ...


class EagerExecutor:
    def run(self, layers: LayerStack, x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Tensor:
        return layers(x, caches, step)

    def for_part(self) -> LayerExecutor:
        return self


class EagerTower:
    tile_counts: Sequence[int] = ()

    def run(self, encode: Callable[[Tensor], Tensor], tiles: Tensor) -> Tensor:
        return encode(tiles)


class HostClock:
    """A `Clock` for devices that compute synchronously."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._marks = [now()]

    def mark(self) -> None:
        self._marks.append(self._now())

    def seconds(self) -> list[float]:
        return [after - before for before, after in pairwise(self._marks)]


class Device(Operations):
    """A device, as one loaded model uses it. This one uses torch's operations."""

    kernels = "torch"
    """Name for logs: "torch", "triton" or an instruction set."""
    keeps_packed = False
    """Quantized weights stay quantized unless the settings say otherwise."""
    chooses_experts = False
    """Routes tokens to experts without the host, so that graphs may hold such layers."""
    overcommits = False
    """Empty tensors take no memory until written."""
    mapped_bytes = 0
    """Bytes of weights in mapped files, which the system counts as free memory."""
    images_per_step = 16
    """Default number of images that the vision tower encodes in one step."""
    stage_products = 2**36
    """MACs of the vision tower below which a stage is not worth its overhead; see `StageBudget`."""
    stage_rows = 128
    """Rows of a stage, or of a part of it; see `StageBudget`."""
    padding_blocks = 0
    """KV blocks for padding rows: 1 if `padded_rows` pads, else 0."""
    bucket_cost = 2**15
    """See `torch_decodes.BUCKET_COST`. Estimate for GPUs: launching a bucket takes as long as reading tens of thousands
    of tokens.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.normalize = Normalizer(torch_device)

    def __str__(self) -> str:
        return str(self.torch_device)

    @property
    def gpu_uuid(self) -> str | None:
        """``GPU-...``, as NVML names it."""
        return None

    @property
    def draw(self) -> Draw:
        return torch_sampling.draw

    @property
    def draw_later(self) -> DrawLater | None:
        """Tokens stay on the device; None: each step waits for its tokens."""
        return None

    def download(self, tensor: Tensor) -> Callable[[], list[int]]:
        """The returned function waits for the copy."""
        return tensor.tolist

    def linear(self, weight: AnyWeight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype) -> LinearKernel:
        return torch_linear(weight, bias, epilogue, dtype)

    def table(self, weight: AnyWeight, dtype: torch.dtype) -> Table:
        return torch_table(weight, dtype)

    def attention(
        self, layers: Sequence[AttentionSpec], dtype: torch.dtype, *, cache_type: CacheType = "auto"
    ) -> AttentionBackend:
        return TorchReference(cache_type=cache_type, bucket_cost=self.bucket_cost)

    def executor(self) -> LayerExecutor:
        """Make an executor for another decoder."""
        return EagerExecutor()

    def tower_executor(self) -> TowerExecutor:
        return EagerTower()

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Arrays must not change before the step has ended. Valid until the next upload."""
        return [torch.from_numpy(array).to(self.torch_device) for array in arrays]

    def upload_pixels(self, pixels: np.ndarray, dtype: torch.dtype, levels: Levels | None = None) -> Tensor:
        """levels: pixel normalization of uint8 values."""
        # from_numpy warns about read-only arrays, such as shared pixels
        if levels is None:
            return torch.tensor(pixels, device=self.torch_device, dtype=dtype)
        return self.normalize(torch.tensor(pixels, device=self.torch_device), levels, dtype)

    def host_blocks(self, layers: Sequence[Blocks], count: int, allocate: AllocateBlocks) -> HostBlocks:
        """Make host memory for copies of blocks, or state slots."""
        return PlainBlocks(layers, allocate(count, torch.device("cpu")))

    def staged_bytes(self, block: int) -> int:
        """Device bytes for copies of `host_blocks`. block: bytes."""
        return 0

    def padded_rows(self, num_rows: int, num_decodes: int) -> int | None:
        """None if no graph can replay the step."""
        return None

    def enforce_eager(self) -> None:
        """Capture no more graphs."""

    def decode_sizes(self, most: int) -> list[int]:
        """Return batch sizes to capture at start, largest first."""
        return []

    def capturing(self, time: CaptureTime) -> AbstractContextManager[None]:
        """Graphs captured at "first" are never dropped."""
        return nullcontext()

    def graph_bytes(self, run: Callable[[], None]) -> int:
        return 0

    def logits_buffer(self, rows: int, vocab_size: int) -> Tensor | None:
        """A float32 ``[rows, vocab_size]`` buffer for all steps; None if fresh memory is as good."""
        return None

    def clock(self) -> Clock:
        return HostClock()

    def work_clock(self) -> Clock:
        """If possible, ignores the time of other processes."""
        return self.clock()

    def cache_budget(self, fraction: float, largest_step: Callable[[], None], reserved: int = 0) -> int:
        """Bytes for the KV cache after loading the model; may be negative.

        fraction: `memory_fraction` of the settings. largest_step: measures activations. reserved: for other caches.
        """
        raise NotImplementedError

    def expected_cache(self, fraction: float, weights: int) -> int:
        """Before `weights` bytes are loaded, without activations."""
        raise NotImplementedError
