"""Devices that use torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from vlmserve.devices.device import (
    AllocateBlocks,
    CaptureTime,
    Clock,
    EagerExecutor,
    EagerTower,
    HostClock,
    LayerExecutor,
    TowerExecutor,
)
from vlmserve.devices.offload import HostBlocks, PlainBlocks
from vlmserve.devices.pixels import Normalizer
from vlmserve.errors import ConfigurationError
from vlmserve.families.spec import ExpertsSpec
from vlmserve.kernels import torch_sampling
from vlmserve.kernels.attention import AttentionBackend
from vlmserve.kernels.blocks import Blocks
from vlmserve.kernels.operations import (
    AnyWeight,
    EncoderKernel,
    Epilogue,
    ExpertProducts,
    ExpertsKernel,
    GateKernel,
    HeadsNorm,
    Norm,
    NormedHeads,
    Product,
    RotationKernel,
    RouterWeights,
    Table,
)
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.kernels.ranges import RangeKernels
from vlmserve.kernels.states import ConvolutionKernel, DeltaKernel, DeltaWeights
from vlmserve.kernels.torch_products import torch_linear, torch_table
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.kernels.torch_sampling import Draw, DrawLater
from vlmserve.layer_specs import AttentionSpec, CacheType, ConvolutionSpec, DeltaSpec
from vlmserve.levels import Levels


class TorchDevice:
    kernels = "torch"
    keeps_packed = False
    chooses_experts = False
    overcommits = False
    mapped_bytes = 0
    images_per_step = 16
    stage_products = 2**36
    stage_rows = 128
    padding_blocks = 0
    bucket_cost = 2**15
    """See `torch_decodes.BUCKET_COST`. Estimate for GPUs: launching a bucket takes as long as reading tens of thousands
    of tokens.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._normalize = Normalizer(torch_device)

    def __str__(self) -> str:
        return str(self.torch_device)

    @property
    def gpu_uuid(self) -> str | None:
        return None

    @property
    def draw(self) -> Draw:
        return torch_sampling.draw

    @property
    def draw_later(self) -> DrawLater | None:
        return None

    def download(self, tensor: Tensor) -> Callable[[], list[int]]:
        return tensor.tolist

    def multiplies(self, weight: QuantizedWeight) -> bool:
        return weight.is_supported

    def multiplies_superblocks(self, input_bits: int | None) -> bool:
        return False

    def product_inputs(self, in_features: int, dtype: torch.dtype) -> int:
        return in_features

    def linear(self, weight: AnyWeight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype) -> Product:
        return torch_linear(weight, bias, epilogue, dtype)

    def table(self, weight: AnyWeight, dtype: torch.dtype) -> Table:
        return torch_table(weight, dtype)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0) -> Norm | None:
        return None

    def heads_norm(self, parts: Sequence[NormedHeads], dtype: torch.dtype) -> HeadsNorm | None:
        return None

    def output_gate(self, dtype: torch.dtype) -> GateKernel | None:
        return None

    def experts(
        self, spec: ExpertsSpec, router: RouterWeights | None, experts: Mapping[int, ExpertProducts]
    ) -> ExpertsKernel | None:
        return None

    def encoder_attention(self, num_heads: int, head_size: int, dtype: torch.dtype) -> EncoderKernel | None:
        return None

    def encoder_rotation(self, dtype: torch.dtype) -> RotationKernel | None:
        return None

    def encoder_ranges(self, num_heads: int, head_size: int, dtype: torch.dtype) -> RangeKernels | None:
        return None

    def delta(self, spec: DeltaSpec, weights: DeltaWeights, dtype: torch.dtype) -> DeltaKernel | None:
        return None

    def convolution(self, spec: ConvolutionSpec, weight: Tensor, dtype: torch.dtype) -> ConvolutionKernel | None:
        return None

    def attention(
        self,
        layers: Sequence[AttentionSpec],
        dtype: torch.dtype,
        *,
        cache_type: CacheType = "auto",
    ) -> AttentionBackend:
        return TorchReference(cache_type=cache_type, bucket_cost=self.bucket_cost)

    def executor(self) -> LayerExecutor:
        return EagerExecutor()

    def tower_executor(self) -> TowerExecutor:
        return EagerTower()

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        return [torch.from_numpy(array).to(self.torch_device) for array in arrays]

    def upload_pixels(self, pixels: np.ndarray, dtype: torch.dtype, levels: Levels | None = None) -> Tensor:
        # from_numpy warns about read-only arrays, such as shared pixels
        if levels is None:
            return torch.tensor(pixels, device=self.torch_device, dtype=dtype)
        return self._normalize(torch.tensor(pixels, device=self.torch_device), levels, dtype)

    def host_blocks(self, layers: Sequence[Blocks], count: int, allocate: AllocateBlocks) -> HostBlocks:
        return PlainBlocks(layers, allocate(count, torch.device("cpu")))

    def staged_bytes(self, block: int) -> int:
        return 0

    def padded_rows(self, num_rows: int, num_decodes: int) -> int | None:
        return None

    def enforce_eager(self) -> None: ...

    def decode_sizes(self, most: int) -> list[int]:
        return []

    def capturing(self, time: CaptureTime) -> AbstractContextManager[None]:
        return nullcontext()

    def graph_bytes(self, run: Callable[[], None]) -> int:
        return 0

    def logits_buffer(self, rows: int, vocab_size: int) -> Tensor | None:
        return None

    def clock(self) -> Clock:
        return HostClock()

    def work_clock(self) -> Clock:
        return self.clock()

    def cache_budget(self, fraction: float, largest_step: Callable[[], None], reserved: int = 0) -> int:
        raise NotImplementedError

    def expected_cache(self, fraction: float, weights: int) -> int:
        raise NotImplementedError


class MpsDevice(TorchDevice):
    def attention(
        self, layers: Sequence[AttentionSpec], dtype: torch.dtype, *, cache_type: CacheType = "auto"
    ) -> AttentionBackend:
        if cache_type == "fp8":
            raise ConfigurationError("--kv-cache-dtype fp8: Metal has no 8-bit floats; use int8")
        return super().attention(layers, dtype, cache_type=cache_type)

    def cache_budget(self, fraction: float, largest_step: Callable[[], None], reserved: int = 0) -> int:
        """The driver's allocation after the largest step is its peak: torch keeps freed memory."""
        largest_step()
        torch.mps.synchronize()
        held = torch.mps.driver_allocated_memory()
        return int(torch.mps.recommended_max_memory() * fraction) - held - reserved

    def expected_cache(self, fraction: float, weights: int) -> int:
        return int(torch.mps.recommended_max_memory() * fraction) - weights
