"""The data flow of a GPU on a CPU: staged uploads, padded batches, and steps that are captured and repeated.

Kernels are torch's operations, and a graph is repeated by calling what was captured again, over the very tensors of the
step in which it was. So whatever a step takes from anywhere else than static memory shows in its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lazy_stream import LazyStream
from tests.static_adapters import StaticLinearKernel
from tests.static_ranges import StaticRanges
from vlmserve.devices import choice
from vlmserve.devices.cpu import CpuDevice
from vlmserve.devices.cuda import CudaDevice
from vlmserve.devices.device import AllocateBlocks, CaptureTime, LayerExecutor, LayerStack, TowerExecutor
from vlmserve.devices.graphs import (
    Captures,
    GraphExecutor,
    TowerGraphs,
    captured_decodes,
    captured_rows,
)
from vlmserve.devices.offload import HostBlocks, PinnedBlocks, block_bytes
from vlmserve.devices.pixels import PixelRing
from vlmserve.devices.staging import Staging
from vlmserve.kernels.attention import AttentionBackend, AttentionContext, BatchMetadata, LayerCache, RotaryRows
from vlmserve.kernels.blocks import Blocks
from vlmserve.kernels.operations import Epilogue, LinearKernel
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.kernels.ranges import RangeKernels
from vlmserve.kernels.torch_cache import write
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.kernels.torch_sampling import Changes, DrawLater, Filters, draw
from vlmserve.kernels.torch_scores import attention_weights
from vlmserve.layer_specs import AttentionSpec, CacheType
from vlmserve.layers.step import StepContext
from vlmserve.levels import Levels

SPLIT = 32
"""Tokens of contexts from which on batches of decodes have other graphs, as those of kernels that split contexts."""


@dataclass(frozen=True)
class StaticPlan:
    """others: the reference's plan, for steps that are not captured."""

    capture_key: Hashable
    others: object


class StaticAttention(TorchReference):
    """Reads lengths where they lie, as kernels do: its shapes depend on the batch's shapes alone."""

    name = "static"
    reads_on_device = True

    def prepare(  # type: ignore[override]
        self, metadata: BatchMetadata, block_size: int, layers: Sequence[AttentionSpec], dtype: torch.dtype
    ) -> StaticPlan:
        """See `AttentionBackend.prepare`."""
        captured = captured_rows(metadata.slot_mapping.shape[1], metadata.num_decodes) is not None
        if captured and not metadata.bidirectional:
            decodes = metadata.num_decodes if metadata.decodes is None else None
            splits = decodes == len(metadata.query_lens) and max(metadata.host_context_lens) > SPLIT
            return StaticPlan((decodes, len(metadata.query_lens), metadata.block_tables.shape, splits), None)
        return StaticPlan(None, super().prepare(metadata, block_size, layers, dtype))

    def attend_rotated(
        self,
        qkv: Tensor,
        rope: RotaryRows | None,
        context: AttentionContext,
    ) -> Tensor:
        spec = context.spec
        heads = qkv.view(len(qkv), -1, spec.head_size)
        query, key, value = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        if rope is None:
            return self.attend(query, key, value, context)
        cos, sin = (part if rope.positions is None else part[rope.positions] for part in (rope.cos, rope.sin))
        size = cos.shape[1]

        def rotated(x: Tensor) -> Tensor:
            first, second, rest = x.split([size, size, x.shape[2] - 2 * size], -1)
            c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
            return torch.cat((first * c - second * s, second * c + first * s, rest), -1)

        return self.attend(rotated(query), rotated(key), value, context)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: AttentionContext,
    ) -> Tensor:
        cache, spec, metadata, plan = context
        assert isinstance(plan, StaticPlan)
        if plan.capture_key is None:
            return super().attend(query, key, value, AttentionContext(cache, spec, metadata, plan.others))
        size, kv_heads = cache.block_size, spec.num_kv_heads
        slots, starts = metadata.slot_mapping[cache.column], metadata.query_starts
        rows_of_batch = torch.arange(len(query), dtype=starts.dtype)
        sequences = torch.searchsorted(starts, rows_of_batch, right=True) - 1
        tables = metadata.block_tables[cache.column].long()[sequences]
        rows = (slots // size * kv_heads * size + slots % size)[:, None] + torch.arange(kv_heads) * size
        write(cache, 0, key, rows.view(-1))
        write(cache, 1, value, rows.view(-1))
        # ``[rows, kv_heads, blocks * block_size, head_size]``, block 0 where a table has ended.
        keys, values = (tensor[tables].transpose(1, 2).flatten(2, 3).to(query.dtype) for tensor in cache.tensors[:2])
        if cache.scales is not None:
            scales = cache.scales[tables].permute(3, 0, 2, 1, 4).flatten(3)[..., None]
            keys, values = keys * scales[0], values * scales[1]
        grouped = query.view(len(query), kv_heads, -1, spec.head_size)
        scores = grouped.float() @ keys.float().transpose(2, 3) * spec.scale
        if spec.soft_cap is not None:
            scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
        places = torch.arange(scores.shape[-1])
        ends = (metadata.context_lens[sequences] - starts[sequences + 1] + rows_of_batch + 1)[:, None]
        hidden = places >= ends
        if spec.window is not None:
            hidden |= places < ends - spec.window
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf).flatten(1, 2)[:, :, None]
        weights = attention_weights(scores, spec).view(len(query), kv_heads, -1, scores.shape[-1])
        # What nobody wrote may be anything.
        values = values.float().masked_fill(hidden[:, None, :, None], 0)
        return (weights @ values).to(query.dtype).flatten(1)


def repeat_by_calls(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Call the function again, for devices without graphs."""
    result = torch.empty(0)

    def again() -> Tensor:
        nonlocal result
        output = run()
        if result.shape != output.shape:
            result = torch.empty_like(output)
        return result.copy_(output)

    return again


def run_and_repeat(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """As CUDA's captures, run a step once before it is repeated. A `Capture`."""
    run()
    return repeat_by_calls(run)


class StaticGraphs(GraphExecutor):
    """What is captured reads rows' adapters where they lay then."""

    def run(self, layers: LayerStack, x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Tensor:
        adapters = step.adapters
        if adapters is None:
            return super().run(layers, x, caches, step)
        captured = adapters.rows, adapters.scalings

        def as_captured(*args: Any) -> Tensor:
            rows, scalings = adapters.rows, adapters.scalings
            adapters.rows, adapters.scalings = captured
            result = layers(*args)
            adapters.rows, adapters.scalings = rows, scalings
            return result

        return super().run(as_captured, x, caches, step)


class StaticDraw:
    """Draws from what was uploaded, as kernels do. A `DrawLater`."""

    def arrays(self, filters: Filters, numbers: Sequence[float], changes: Changes) -> list[np.ndarray]:
        """See `DrawLater.arrays`."""
        return [*(np.asarray(values, np.float64) for values in filters), np.asarray(numbers, np.float64), *changes]

    def launch(self, logits: Tensor, uploaded: Sequence[Tensor]) -> Tensor:
        """See `DrawLater.launch`."""
        temperatures, top_ks, top_ps, min_ps, numbers, (rows, ids), (biases, repetition, subtracted) = uploaded
        changed = logits[rows, ids] + biases
        changed = torch.where(changed > 0, changed / repetition, changed * repetition)
        logits[rows, ids] = changed - subtracted
        filters = Filters(temperatures.tolist(), top_ks.int().tolist(), top_ps.tolist(), min_ps.tolist())
        return torch.tensor(draw(logits, filters, numbers.tolist()), dtype=torch.int32)


class StaticDevice(CpuDevice):
    """A CPU that runs steps as a GPU does, one ahead. `executors` are those that it has given out. warms_up: whether
    engines capture steps at start. captures_repeats: see `Captures.repeats`."""

    padding_blocks = 1
    warms_up = False
    captures_repeats = True

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self.num_running = self.num_ahead = 0
        self._staging = Staging(torch_device, reserve=2**16)
        self.executors: list[GraphExecutor] = []
        self._captures = Captures(run_and_repeat, repeats=self.captures_repeats)
        self._copies = LazyStream(lazy=True)
        self._pixels = PixelRing(self._copies, pinned=False)

    product_inputs = CudaDevice.product_inputs
    """See `Operations.product_inputs`."""

    def linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype
    ) -> LinearKernel:
        """See `Operations.linear`."""
        return StaticLinearKernel(super().linear(weight, bias, epilogue, dtype))

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """See `Device.upload`."""
        return self._staging.upload(arrays)

    @property
    def draw_later(self) -> DrawLater | None:
        """See `Device.draw_later`."""
        return StaticDraw()

    def download(self, tensor: Tensor) -> Callable[[], list[int]]:
        """See `Device.download`. `num_ahead` counts how often one begins before the one before has ended."""
        self.num_ahead += self.num_running > 0
        self.num_running += 1

        def values() -> list[int]:
            self.num_running -= 1
            return tensor.tolist()

        return values

    def upload_pixels(self, pixels: np.ndarray, dtype: torch.dtype, levels: Levels | None = None) -> Tensor:
        """See `Device.upload_pixels`."""
        uploaded = self._pixels.upload(pixels)
        return uploaded.to(dtype) if levels is None else self.normalize(uploaded, levels, dtype)

    def host_blocks(self, layers: Sequence[Blocks], count: int, allocate: AllocateBlocks) -> HostBlocks:
        """See `Device.host_blocks`."""
        return PinnedBlocks(layers, torch.zeros(count, block_bytes(layers), dtype=torch.uint8), self._copies)

    staged_bytes = CudaDevice.staged_bytes

    def padded_rows(self, num_rows: int, num_decodes: int) -> int | None:
        """See `Device.padded_rows`."""
        return self._captures.padded_rows(num_rows, num_decodes) if self.executors else None

    def enforce_eager(self) -> None:
        """See `Device.enforce_eager`."""
        self._captures.is_on = False

    def decode_sizes(self, most: int) -> list[int]:
        """See `Device.decode_sizes`."""
        return captured_decodes(most) if self.warms_up and self.executors and self._captures.is_on else []

    def capturing(self, time: CaptureTime) -> AbstractContextManager[None]:
        """See `Device.capturing`."""
        return self._captures.at(time)

    def tower_executor(self) -> TowerExecutor:
        """See `Device.tower_executor`."""
        self.tower_graphs = TowerGraphs(self._captures)
        return self.tower_graphs

    def executor(self) -> LayerExecutor:
        """See `Device.executor`."""
        self.executors.append(StaticGraphs(self._captures))
        return self.executors[-1]

    def encoder_ranges(self, num_heads: int, head_size: int, dtype: torch.dtype) -> RangeKernels | None:
        """See `Operations.encoder_ranges`."""
        return StaticRanges(num_heads)

    def attention(
        self,
        layers: Sequence[AttentionSpec],
        dtype: torch.dtype,
        *,
        cache_type: CacheType = "auto",
    ) -> AttentionBackend:
        """See `Device.attention`."""
        return StaticAttention(cache_type=cache_type)


kind_of_device = StaticDevice
"""That models run on. `tests.ptx.plugin` puts one with a GPU's kernels here."""


@pytest.fixture
def kernels() -> str:
    """There is one kind of them."""
    return "static"


def replace_cpus(patch: pytest.MonkeyPatch) -> list[StaticDevice]:
    """Have models run on static devices instead of CPUs. Returns the devices in use."""
    devices: list[StaticDevice] = []

    def opened(
        torch_device: torch.device, kernels: str, stated: torch.dtype, *, automatic: bool
    ) -> tuple[StaticDevice, torch.dtype]:
        devices.append(kind_of_device(torch_device))
        return devices[-1], stated

    patch.setitem(choice.KINDS, "cpu", opened)
    return devices


@pytest.fixture(scope="module", autouse=True)
def static_devices() -> Iterator[list[StaticDevice]]:
    """In modules that import this, all models run on such devices, which are in the list. Some step of theirs has to be
    captured."""
    with pytest.MonkeyPatch.context() as patch:
        devices = replace_cpus(patch)
        yield devices
    assert any(executor.num_captured for device in devices for executor in device.executors)
    assert any(device.num_ahead for device in devices)
