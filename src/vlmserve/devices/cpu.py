"""CPUs, with native kernels or torch's operations."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from vlmserve.devices.device import Clock, Device, HostClock, LayerExecutor, LayerStack
from vlmserve.errors import ConfigurationError
from vlmserve.families.spec import ExpertsSpec
from vlmserve.kernels import cpu_experts, cpu_sampling, cpu_states
from vlmserve.kernels.attention import AttentionBackend, LayerCache
from vlmserve.kernels.choice import choose_kernels, has_onednn, multiplies_bfloat16
from vlmserve.kernels.cpu_attention import CpuAttention, gate_output, unsupported_reason
from vlmserve.kernels.cpu_native import (
    ACTIVATIONS,
    NativeHeadsNorm,
    NativeNorm,
    PackedLinear,
    can_pack,
    encoder_attention,
    rotate_heads,
)
from vlmserve.kernels.cpu_program import NotRecordable, Program, Recording, Unknown
from vlmserve.kernels.extension import DTYPES, extension
from vlmserve.kernels.isas import SUPERBLOCK_ISAS
from vlmserve.kernels.operations import (
    AnyWeight,
    EncoderKernel,
    Epilogue,
    ExpertKernels,
    ExpertsKernel,
    GateKernel,
    HeadsNorm,
    LinearKernel,
    Norm,
    NormedHeads,
    RotationKernel,
    RouterWeights,
    Table,
)
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.kernels.states import ConvolutionKernel, DeltaKernel, DeltaWeights, StateCache
from vlmserve.kernels.torch_decodes import BUCKET_COST
from vlmserve.kernels.torch_products import ReorderedLinearKernel, torch_linear
from vlmserve.kernels.torch_sampling import Draw
from vlmserve.kernels.trials import superblocks_are_as_fast
from vlmserve.layer_specs import AttentionSpec, CacheType, ConvolutionSpec, DeltaSpec, StateSpec
from vlmserve.layers.step import StepContext
from vlmserve.memory import free_memory

logger = logging.getLogger(__name__)

CACHE_SHARE = 0.5
"""Fraction of the memory that is free after loading; the rest is for activations and other processes."""


def open_cpu(
    torch_device: torch.device, kernels: str, stated: torch.dtype, *, automatic: bool
) -> tuple[CpuDevice, torch.dtype]:
    """See `open_device`. Never runs float16.

    Without bfloat16 instructions, native kernels read bfloat16 weights and compute in float32, because torch's bfloat16
    matmuls take several times longer.
    """
    if stated == torch.float32:
        return _with_kernels(torch_device, choose_kernels(kernels, stated)), stated
    isa = choose_kernels(kernels, torch.bfloat16)
    computes_well = isa is not None or multiplies_bfloat16()
    wanted = torch.float32 if not computes_well and (automatic or stated == torch.float16) else torch.bfloat16
    if wanted != stated:
        logger.info("this CPU computes %s slowly: the model runs in %s", stated, wanted)
    elif not computes_well:
        logger.info("this CPU computes %s slowly: matmuls of many rows run in float32", stated)
    return _with_kernels(torch_device, isa), wanted


def _with_kernels(torch_device: torch.device, isa: str | None) -> CpuDevice:
    return CpuDevice(torch_device) if isa is None else NativeCpuDevice(torch_device, isa)


class CpuDevice(Device):
    overcommits = True
    images_per_step = 4
    stage_products = 2**28
    stage_rows = 96
    bucket_cost = BUCKET_COST

    def work_clock(self) -> Clock:
        """CPU time of the process, divided by its threads."""
        threads = torch.get_num_threads()
        return HostClock(lambda: time.process_time() / threads)

    def linear(self, weight: AnyWeight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype) -> LinearKernel:
        if isinstance(weight, Tensor) and can_reorder(dtype, weight.device):
            return ReorderedLinearKernel(weight, bias, epilogue)
        return torch_linear(weight, bias, epilogue, dtype)

    def table(self, weight: AnyWeight, dtype: torch.dtype) -> Table:
        """oneDNN cannot return single rows of a packed table."""
        return torch_linear(weight, None, Epilogue(float_output=True), dtype)

    def cache_budget(self, fraction: float, largest_step: Callable[[], None], reserved: int = 0) -> int:
        """Ignores `fraction`. Unwritten pages take no memory, so nothing is reserved."""
        return self.expected_cache(fraction, self.mapped_bytes)

    def expected_cache(self, fraction: float, weights: int) -> int:
        return int((free_memory() - weights) * CACHE_SHARE)


def can_reorder(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN packs weights of this type."""
    if device.type != "cpu" or not has_onednn():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bfloat16())


class NativeCpuDevice(CpuDevice):
    """kernels: their instruction set."""

    keeps_packed = True
    chooses_experts = True

    def __init__(self, torch_device: torch.device, isa: str) -> None:
        super().__init__(torch_device)
        self.kernels = isa
        self._logits = torch.empty(0)

    @property
    def draw(self) -> Draw:
        return cpu_sampling.draw

    def multiplies(self, weight: QuantizedWeight) -> bool:
        return weight.is_supported or weight.is_in_byte_groups or weight.is_in_coded_groups

    def multiplies_superblocks(self, input_bits: int | None) -> bool:
        """Inputs are rounded to 8-bit, as in llama.cpp."""
        if input_bits == 16 or not extension().has_superblocks():
            return False
        return self.kernels in SUPERBLOCK_ISAS or superblocks_are_as_fast(self.kernels)

    def linear(self, weight: AnyWeight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype) -> LinearKernel:
        knows_activation = epilogue.activation is None or epilogue.activation in ACTIVATIONS
        if not (knows_activation and self._can_pack(weight, dtype)):
            return super().linear(weight, bias, epilogue, dtype)
        return PackedLinear(
            weight,
            bias,
            dtype=dtype,
            activation=epilogue.activation,
            gated=epilogue.gated,
            float_output=epilogue.float_output,
        )

    def table(self, weight: AnyWeight, dtype: torch.dtype) -> Table:
        if not self._can_pack(weight, dtype):
            return super().table(weight, dtype)
        return PackedLinear(weight, dtype=dtype, float_output=True)

    def _can_pack(self, weight: AnyWeight, dtype: torch.dtype) -> bool:
        if isinstance(weight, QuantizedWeight) and not self.multiplies(weight):
            return False
        return can_pack(weight.shape[1], dtype)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0) -> Norm | None:
        return NativeNorm(weight, bias, eps, offset)

    def heads_norm(self, parts: Sequence[NormedHeads], dtype: torch.dtype) -> HeadsNorm | None:
        return NativeHeadsNorm(parts, dtype)

    def output_gate(self, dtype: torch.dtype) -> GateKernel | None:
        return gate_output if dtype in DTYPES else None

    def experts(
        self, spec: ExpertsSpec, router: RouterWeights | None, experts: Mapping[int, ExpertKernels]
    ) -> ExpertsKernel | None:
        if router is None:
            return None
        if (reason := cpu_experts.unsupported_reason(router.product, experts)) is not None:
            logger.info("experts: one call per matmul (%s)", reason)
            return None
        return cpu_experts.NativeExperts(spec, router, experts)

    def encoder_attention(self, num_heads: int, head_size: int, dtype: torch.dtype) -> EncoderKernel | None:
        return partial(encoder_attention, num_heads=num_heads) if can_pack(head_size, dtype) else None

    def encoder_rotation(self, dtype: torch.dtype) -> RotationKernel | None:
        return rotate_heads if dtype in DTYPES else None

    def delta(self, spec: DeltaSpec, weights: DeltaWeights, dtype: torch.dtype) -> DeltaKernel | None:
        return cpu_states.NativeDelta(spec, weights, dtype) if self._serves(spec, dtype) else None

    def convolution(self, spec: ConvolutionSpec, weight: Tensor, dtype: torch.dtype) -> ConvolutionKernel | None:
        return cpu_states.NativeConvolution(spec, weight, dtype) if self._serves(spec, dtype) else None

    def _serves(self, spec: StateSpec, dtype: torch.dtype) -> bool:
        if (reason := cpu_states.unsupported_reason(spec, dtype)) is not None:
            logger.info("states: torch (%s)", reason)
        return reason is None

    def attention(
        self,
        layers: Sequence[AttentionSpec],
        dtype: torch.dtype,
        *,
        cache_type: CacheType = "auto",
    ) -> AttentionBackend:
        if cache_type == "fp8":
            raise ConfigurationError(
                "--kv-cache-dtype fp8: native CPU kernels store no 8-bit floats; use int8, or add --kernels torch"
            )
        asked = partial(unsupported_reason, cache_type=cache_type)
        reasons = (asked(spec, dtype, self.torch_device) for spec in layers)
        if (reason := next(filter(None, reasons), None)) is not None:
            logger.info("attention: torch (%s)", reason)
            return super().attention(layers, dtype, cache_type=cache_type)
        return CpuAttention(cache_type=cache_type)

    def executor(self) -> LayerExecutor:
        return ProgramExecutor()

    def logits_buffer(self, rows: int, vocab_size: int) -> Tensor | None:
        """Page faults of fresh memory would take longer than sampling."""
        if rows * vocab_size > len(self._logits):
            self._logits = torch.empty(rows * vocab_size)
        return self._logits[: rows * vocab_size].view(rows, vocab_size)


class ProgramExecutor:
    """Runs all layers in one call if native kernels support them."""

    def __init__(self) -> None:
        self._recorded: tuple[weakref.ref[LayerCache], weakref.ref[LayerCache | StateCache], Program | None] | None = (
            None
        )

    def run(self, layers: LayerStack, x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Tensor:
        # programs support neither query scales nor adapters without kernels
        beside = step.adapters is not None and step.adapters.has_unpacked
        program = None if beside or step.query_scale is not None else self.program(layers, x, caches, step)
        if program is None:
            return layers(x, caches, step)
        ropes = [rope.rows for rope in step.ropes]
        if step.adapters is None:
            return program.run(x, ropes, step.plan)
        return program.run(x, ropes, step.plan, step.adapters.rows.slots, step.adapters.scalings)

    def for_part(self) -> LayerExecutor:
        return ProgramExecutor()

    def program(self, layers: LayerStack, x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Program | None:
        """None if an operation has no native kernel."""
        first = caches[0] if not step.states else step.states[0]
        if self._recorded is None or self._recorded[0]() is not caches[0] or self._recorded[1]() is not first:
            self._recorded = weakref.ref(caches[0]), weakref.ref(first), record(layers, x, caches, step)
        return self._recorded[2]


def record(layers: LayerStack, x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Program | None:
    recording = Recording(x.shape[1], x.dtype)
    unknown: Any = Unknown("cross-attention")
    unknown.states = Unknown("states")
    ropes = [cast(Any, recording.rope(rope.size)) for rope in step.ropes]
    context = StepContext(unknown, ropes, unknown, states=step.states)
    try:
        return recording.finish(layers(recording.input, caches, context))
    except NotRecordable as error:
        logger.info("layers: one call per kernel, which decodes small models more slowly (no kernel for %s)", error)
        return None
