"""NVIDIA GPUs, and AMD GPUs with ROCm, which torch also calls "cuda"."""

from __future__ import annotations

import importlib.util
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vlmserve.devices.device import (
    AllocateBlocks,
    CaptureTime,
    Clock,
    Device,
    EagerExecutor,
    LayerExecutor,
    TowerExecutor,
)
from vlmserve.devices.graphs import Captures, GraphExecutor, TowerGraphs, captured_decodes
from vlmserve.devices.offload import HostBlocks, PinnedBlocks, block_bytes, staged_bytes
from vlmserve.devices.pixels import PixelRing
from vlmserve.devices.staging import Staging
from vlmserve.devices.streams import CudaCopyStream
from vlmserve.families.spec import ExpertsSpec
from vlmserve.kernels import torch_float8, torch_int4
from vlmserve.kernels.attention import AttentionBackend
from vlmserve.kernels.blocks import Blocks, allocate_zeros
from vlmserve.kernels.gguf_weight import GGUFWeight
from vlmserve.kernels.operations import (
    AnyWeight,
    Epilogue,
    ExpertKernels,
    ExpertsKernel,
    LinearKernel,
    Norm,
    RouterWeights,
    Table,
)
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.kernels.ranges import RangeKernels
from vlmserve.kernels.states import ConvolutionKernel, DeltaKernel, DeltaWeights
from vlmserve.kernels.torch_products import QuantizedLinearKernel
from vlmserve.kernels.torch_sampling import DrawLater
from vlmserve.layer_specs import AttentionSpec, CacheType, ConvolutionSpec, DeltaSpec
from vlmserve.levels import Levels

if TYPE_CHECKING:
    from vlmserve.kernels.triton.sampling import TritonDraw

logger = logging.getLogger(__name__)

BLOCK_ELEMENTS = 2**24
"""Quantized weights dequantized at a time. Larger blocks need fewer launches."""
STAGED_BYTES = 2**22
"""Bytes of a step's arrays before their buffer must grow, which invalidates captured steps."""
ROW_BYTES = 16
"""Row alignment of a matmul's operands in bytes, for the tensor memory accelerator and wide loads."""
PADDED_INPUTS = 64
"""Unaligned inputs are padded to a multiple of this, a tile of tensor cores."""
LEAST_CAPABILITY = (8, 0)
"""Minimum compute capability: bfloat16 matmuls came with the A100."""

NOT_AS_STORED = "inputs or outputs of some weights are in another order"

OVERLAP_CAPABILITY = (9, 0)
"""Minimum compute capability for launching a kernel before its predecessor ends: see `kernels.triton.dependent`."""


def open_cuda(
    torch_device: torch.device, kernels: str, stated: torch.dtype, *, automatic: bool
) -> tuple[CudaDevice, torch.dtype]:
    """See `open_device`. Uses Triton kernels unless torch's were chosen or Triton cannot run."""
    if torch_device.index is not None:
        torch.cuda.set_device(torch_device)
    reason = "--kernels torch" if kernels == "torch" else no_triton(torch_device)
    if reason is None:
        from vlmserve.kernels.triton.launching import Kernel  # Triton may be missing

        Kernel.overlaps = torch.cuda.get_device_capability(torch_device) >= OVERLAP_CAPABILITY
        return TritonDevice(torch_device), stated
    logger.info("kernels: torch on %s (%s)", torch_device, reason)
    return CudaDevice(torch_device), stated


def no_triton(torch_device: torch.device) -> str | None:
    """Return why Triton cannot run."""
    if torch.version.hip is not None:
        return "those in Triton were made for NVIDIA's GPUs"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    capability = torch.cuda.get_device_capability(torch_device)
    if capability < LEAST_CAPABILITY:
        return f"those in Triton need compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    return None


def no_int4(torch_device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "torch's 4-bit matmul supports NVIDIA GPUs only"
    capability = torch.cuda.get_device_capability(torch_device)
    if capability < LEAST_CAPABILITY:
        return "torch's 4-bit matmul needs compute capability 8.0"
    return None


class CudaDevice(Device):
    """It computes asynchronously."""

    def __init__(self, torch_device: torch.device) -> None:
        """Measures free memory, so make it before the model is loaded."""
        super().__init__(torch_device)
        self._free_before = torch.cuda.mem_get_info(torch_device)[0]
        self._allocated_before = torch.cuda.memory_allocated(torch_device)
        self._reserved_before = torch.cuda.memory_reserved(torch_device)
        self._staging: Staging | None = None
        self._pixels: PixelRing | None = None

    @cached_property
    def _copies(self) -> CudaCopyStream:
        return CudaCopyStream(self.torch_device)

    @property
    def gpu_uuid(self) -> str | None:
        if torch.version.hip is not None:
            return None
        return f"GPU-{torch.cuda.get_device_properties(self.torch_device).uuid}"

    def multiplies(self, weight: QuantizedWeight) -> bool:
        """float8, if torch multiplies in it."""
        if not weight.is_float8:
            return super().multiplies(weight)
        if torch.version.hip is not None:
            return False
        capability = torch.cuda.get_device_capability(self.torch_device)
        reason = torch_float8.unsupported_reason(weight, capability)
        if reason is not None:
            logger.info("linear of %s: dequantized from float8 (%s)", tuple(weight.shape), reason)
        return reason is None

    @property
    def _multiplies_float8_rows(self) -> bool:
        return torch.cuda.get_device_capability(self.torch_device) >= torch_float8.ROWS_CAPABILITY

    def product_inputs(self, in_features: int, dtype: torch.dtype) -> int:
        """cuBLAS's fast kernels need rows at multiples of 16 bytes."""
        if in_features * dtype.itemsize % ROW_BYTES == 0:
            return in_features
        return -(-in_features // PADDED_INPUTS) * PADDED_INPUTS

    def linear(self, weight: AnyWeight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype) -> LinearKernel:
        if not isinstance(weight, QuantizedWeight):
            return super().linear(weight, bias, epilogue, dtype)
        if weight.is_float8:
            return torch_float8.Float8LinearKernel(weight, bias, epilogue, dtype, by_rows=self._multiplies_float8_rows)
        reason = torch_int4.unsupported_reason(weight, dtype) or no_int4(self.torch_device)
        if reason is None:
            logger.info("linear of %s: torch's 4-bit matmul", tuple(weight.shape))
            return torch_int4.Int4LinearKernel(weight, bias, epilogue)
        logger.info("linear of %s: dequantized in each step (%s)", tuple(weight.shape), reason)
        return QuantizedLinearKernel(weight, bias, epilogue, dtype, block_elements=BLOCK_ELEMENTS)

    def table(self, weight: AnyWeight, dtype: torch.dtype) -> Table:
        if isinstance(weight, QuantizedWeight) and weight.is_float8:
            by_rows = self._multiplies_float8_rows
            return torch_float8.Float8LinearKernel(weight, None, Epilogue(float_output=True), dtype, by_rows=by_rows)
        if isinstance(weight, QuantizedWeight):
            epilogue = Epilogue(float_output=True)
            return QuantizedLinearKernel(weight, None, epilogue, dtype, block_elements=BLOCK_ELEMENTS)
        return super().table(weight, dtype)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        if self._staging is None:
            self._staging = Staging(self.torch_device, reserve=STAGED_BYTES)
        return self._staging.upload(arrays)

    def upload_pixels(self, pixels: np.ndarray, dtype: torch.dtype, levels: Levels | None = None) -> Tensor:
        """Asynchronous, from pinned memory."""
        if self._pixels is None:
            self._pixels = PixelRing(self._copies)
        uploaded = self._pixels.upload(pixels)
        return uploaded.to(dtype) if levels is None else self.normalize(uploaded, levels, dtype)

    def host_blocks(self, layers: Sequence[Blocks], count: int, allocate: AllocateBlocks) -> HostBlocks:
        memory = allocate_zeros((count, block_bytes(layers)), torch.uint8, torch.device("cpu"))
        blocks = PinnedBlocks(layers, memory, self._copies)
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]
        if error:
            logger.warning("--kv-offload-memory: the memory is not pinned (CUDA error %d), so steps wait for it", error)
        else:
            # if the system frees registered memory, unrelated CUDA calls fail
            weakref.finalize(blocks, _unregister, memory, self.torch_device).atexit = False
        return blocks

    def staged_bytes(self, block: int) -> int:
        return staged_bytes(block)

    def download(self, tensor: Tensor) -> Callable[[], list[int]]:
        """Copies to pinned memory, which torch reuses."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self.torch_device))

        def values() -> list[int]:
            copied.synchronize()
            return host.tolist()

        return values

    def clock(self) -> Clock:
        """Also selects the device: Triton and CUDA graphs use the thread's current device."""
        if self.torch_device.index is not None:
            torch.cuda.set_device(self.torch_device)
        return EventClock(self.torch_device)

    def cache_budget(self, fraction: float, largest_step: Callable[[], None], reserved: int = 0) -> int:
        """Weights, activations and caches take `fraction` of the memory, as in vLLM, or what is free."""
        device = self.torch_device
        torch.cuda.reset_peak_memory_stats(device)
        largest_step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - self._allocated_before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - self._reserved_before
        beside_torch = max(0, self._free_before - free - held)
        wanted = int(total * fraction)
        if wanted > self._free_before:
            logger.warning(
                "%.1f of %.1f GiB are free on %s, less than --memory-fraction %g: the KV cache takes what is left",
                self._free_before / 2**30, total / 2**30, device, fraction,
            )  # fmt: skip
        return min(wanted, self._free_before) - peak - beside_torch - reserved

    def expected_cache(self, fraction: float, weights: int) -> int:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return min(int(total * fraction), free) - weights


class TritonDevice(CudaDevice):
    """Triton kernels where possible, and CUDA graphs for small steps."""

    kernels = "triton"
    padding_blocks = 1
    chooses_experts = True
    captures_repeats: ClassVar[bool] = False
    """See `Captures.repeats`. A class attribute, for benchmarks."""

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self._capture = CudaCapture(torch_device)
        self._captures = Captures(self._capture, repeats=self.captures_repeats)
        self._captures_layers = True
        self._repeats = False
        self._draw: TritonDraw | None = None

    @property
    def draw(self) -> TritonDraw:
        if self._draw is None:
            from vlmserve.kernels.triton.sampling import TritonDraw

            options = Staging(self.torch_device)
            self._draw = TritonDraw(lambda values: options.upload([values])[0])
        return self._draw

    @property
    def draw_later(self) -> DrawLater | None:
        return self.draw

    def linear(self, weight: AnyWeight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype) -> LinearKernel:
        from vlmserve.kernels.triton.products import TritonLinearKernel
        from vlmserve.kernels.triton.stored import unsupported_reason

        if isinstance(weight, GGUFWeight):
            return super().linear(weight, bias, epilogue, dtype)
        if isinstance(weight, QuantizedWeight) and weight.is_float8 and self._multiplies_float8_rows:
            from vlmserve.kernels.triton.float8 import TritonFloat8LinearKernel

            return TritonFloat8LinearKernel(weight, bias, epilogue, dtype)
        if (reason := unsupported_reason(weight, epilogue.activation)) is not None:
            logger.info("linear of %s: torch (%s)", tuple(weight.shape), reason)
            return super().linear(weight, bias, epilogue, dtype)
        return TritonLinearKernel(
            weight,
            bias,
            dtype=dtype,
            activation=epilogue.activation,
            gated=epilogue.gated,
            float_output=epilogue.float_output,
        )

    def table(self, weight: AnyWeight, dtype: torch.dtype) -> Table:
        from vlmserve.kernels.triton.products import TritonLinearKernel
        from vlmserve.kernels.triton.stored import unsupported_reason

        if isinstance(weight, GGUFWeight) or unsupported_reason(weight, None) is not None:
            return super().table(weight, dtype)
        return TritonLinearKernel(weight, dtype=dtype, float_output=True)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0) -> Norm | None:
        from vlmserve.kernels.triton.norm import MAX_SIZE, TritonNorm

        if len(weight) > MAX_SIZE:
            return None
        return TritonNorm(weight.float() + offset if offset else weight, bias, eps)

    def delta(self, spec: DeltaSpec, weights: DeltaWeights, dtype: torch.dtype) -> DeltaKernel | None:
        from vlmserve.kernels.triton.states import TritonDelta, unsupported_reason

        if (reason := unsupported_reason(spec)) is not None:
            logger.info("states: torch (%s)", reason)
            return None
        return TritonDelta(spec, weights)

    def convolution(self, spec: ConvolutionSpec, weight: Tensor, dtype: torch.dtype) -> ConvolutionKernel | None:
        from vlmserve.kernels.triton.states import TritonConvolution

        return TritonConvolution(spec, weight)

    def experts(
        self, spec: ExpertsSpec, router: RouterWeights | None, experts: Mapping[int, ExpertKernels]
    ) -> ExpertsKernel | None:
        """Otherwise the host routes tokens, and no graph holds the layer."""
        from vlmserve.kernels.triton.experts import TritonExperts, unsupported_reason

        reason = NOT_AS_STORED if router is None else unsupported_reason(router, experts)
        if router is None or reason is not None:
            logger.info("experts: one matmul after the other, without CUDA graphs (%s)", reason)
            self.enforce_eager()
            return None
        return TritonExperts(spec, router, experts)

    def encoder_ranges(self, num_heads: int, head_size: int, dtype: torch.dtype) -> RangeKernels | None:
        from vlmserve.kernels.triton.encoder import TritonRanges, unsupported_reason

        if (reason := unsupported_reason(head_size, dtype)) is not None:
            logger.info("attention of the vision tower: torch, one image after the other (%s)", reason)
            return None
        return TritonRanges(num_heads, head_size)

    def attention(
        self,
        layers: Sequence[AttentionSpec],
        dtype: torch.dtype,
        *,
        cache_type: CacheType = "auto",
    ) -> AttentionBackend:
        from vlmserve.kernels.triton.attention import TritonAttention, unsupported_reason

        reason = unsupported_reason(layers, dtype)
        self._captures_layers = reason is None
        if reason is not None:
            logger.info("attention: torch, without CUDA graphs (%s)", reason)
            return super().attention(layers, dtype, cache_type=cache_type)
        logger.info("attention: triton")
        return TritonAttention(cache_type=cache_type)

    def executor(self) -> LayerExecutor:
        """Layers that read lengths on the host run one by one."""
        if not self._captures_layers:
            return EagerExecutor()
        self._repeats = True
        return GraphExecutor(self._captures)

    def tower_executor(self) -> TowerExecutor:
        return TowerGraphs(self._captures)

    def padded_rows(self, num_rows: int, num_decodes: int) -> int | None:
        return self._captures.padded_rows(num_rows, num_decodes) if self._repeats else None

    def enforce_eager(self) -> None:
        self._captures.is_on = False

    def decode_sizes(self, most: int) -> list[int]:
        return captured_decodes(most) if self._captures.is_on and self._repeats else []

    def graph_bytes(self, run: Callable[[], None]) -> int:
        """Libraries allocate another workspace on the capture stream."""
        if not self._captures.is_on:
            return 0
        device = self.torch_device
        torch.cuda.reset_peak_memory_stats(device)
        with torch.cuda.stream(self._capture.stream):
            run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)

    def capturing(self, time: CaptureTime) -> AbstractContextManager[None]:
        return self._captures.at(time)


class CudaCapture:
    """CUDA graphs that share memory for activations and results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """Graphs share a pool only if one stream allocated it."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self.stream.wait_stream(current)
        # unlike `torch.cuda.graph`, this restores the stream if ending the capture fails
        with torch.cuda.stream(self.stream):
            # a capture cannot record what the first call compiles or allocates
            try:
                run()
            finally:
                # if capturing fails, the step runs after everything launched here
                current.wait_stream(self.stream)
            # other threads may allocate memory and wait for events
            with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
                owned = run().contiguous()
        result = unowned(owned)

        def again() -> Tensor:
            graph.replay()
            return result

        return again


class _Bytes:
    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 2
        }  # fmt: skip


def unowned(tensor: Tensor) -> Tensor:
    """It owns no memory, so other graphs of the pool may reuse it."""
    return torch.as_tensor(_Bytes(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


def _unregister(memory: Tensor, device: torch.device) -> None:
    """Waits for all copies."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


class EventClock:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def seconds(self) -> list[float]:
        self._events[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._events)]
