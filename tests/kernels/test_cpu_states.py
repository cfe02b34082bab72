"""Native kernels of layers with states against torch's reference, and in programs against one call per layer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.native import built
from tests.state_rows import inputs_of, run_with_drafts, width
from vlmserve.devices.cpu import NativeCpuDevice
from vlmserve.kernels.blocks import allocate_states
from vlmserve.kernels.cpu_program import CpuPlan, Recording
from vlmserve.kernels.cpu_states import NativeConvolution, NativeDelta, addresses_of, unsupported_reason
from vlmserve.kernels.extension import selected_isa
from vlmserve.kernels.operations import Epilogue
from vlmserve.kernels.states import ConvolutionKernel, DeltaKernel, DeltaWeights, Segments, StateCache, StateRows
from vlmserve.kernels.torch_states import TorchConvolution, TorchDelta
from vlmserve.layer_specs import ConvolutionSpec, DeltaSpec, StateSpec

CPU = torch.device("cpu")
DELTA = DeltaSpec(num_key_heads=2, num_value_heads=6, key_size=16, value_size=48, kernel=4)
WIDE_KERNEL = DeltaSpec(num_key_heads=2, num_value_heads=2, key_size=48, value_size=16, kernel=7)
CONVOLUTION = ConvolutionSpec(channels=150, kernel=3)
WIDEST = ConvolutionSpec(channels=20, kernel=8)
QWEN35 = DeltaSpec(num_key_heads=1, num_value_heads=2, key_size=128, value_size=128, kernel=4)
SPECS = (DELTA, WIDE_KERNEL, QWEN35, CONVOLUTION, WIDEST)
SLOTS = 12
Chunks = list[tuple[int, int]]
STEPS: tuple[tuple[Chunks, Mapping[int, int], Mapping[int, Mapping[int, int]]], ...] = (
    # Decodes, one of them from another slot and one from zeros.
    ([(5, 6), (100, 101), (0, 1)], {1: 9}, {}),
    # A checkpoint inside and at the end, chunks of two and three rows and across multiples of 64.
    ([(5, 6), (0, 150), (70, 72), (3, 70)], {3: 7}, {1: {37: 8, 149: 9}, 2: {72: 11}, 3: {5: 10}}),
    # Chunks of 15, 16, 17 and 33 rows.
    ([(49, 64), (48, 64), (47, 64), (0, 33)], {}, {}),
)

pytestmark = built


def kernels(spec: StateSpec, dtype: torch.dtype) -> list[DeltaKernel | ConvolutionKernel]:
    """Torch's and the native one."""
    if isinstance(spec, ConvolutionSpec):
        weight = torch.randn(spec.channels, spec.kernel).to(dtype)
        return [TorchConvolution(weight), NativeConvolution(spec, weight, dtype)]
    weights = DeltaWeights(
        (torch.randn(spec.channels, spec.kernel) / 2).to(dtype),
        -torch.rand(spec.num_value_heads) * 16,
        torch.randn(spec.num_value_heads) - 3,
        torch.rand(spec.value_size).to(dtype) + 0.5,
        1e-6,
    )
    return [TorchDelta(spec, weights), NativeDelta(spec, weights, dtype)]


def random_states(spec: StateSpec, dtype: torch.dtype, draft_places: int = 0) -> StateCache:
    [cache] = allocate_states([spec], SLOTS, dtype, CPU, draft_places)
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    return cache


def copied(cache: StateCache) -> StateCache:
    return StateCache(cache.tail.clone(), None if cache.states is None else cache.states.clone())


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_native_states_equal_torch(isa: str, spec: StateSpec, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made = kernels(spec, dtype)
    for chunks, sources, checkpoints in STEPS:
        segments = Segments.of_chunks(chunks, [1, 2, 3, 4][: len(chunks)], sources, checkpoints)
        rows = StateRows.of(segments)
        mixed = torch.randn(int(segments.starts[-1]), width(spec)).to(dtype)
        expected_states = random_states(spec, dtype)
        states = copied(expected_states)
        expected, actual = (
            kernel(*inputs_of(spec, mixed), cache, rows)
            for kernel, cache in zip(made, (expected_states, states), strict=True)
        )
        assert_close(actual, expected, dtype)
        assert torch.equal(states.tail, expected_states.tail)
        if states.states is not None:
            assert expected_states.states is not None
            torch.testing.assert_close(states.states, expected_states.states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_native_drafts_equal_torch(isa: str, spec: StateSpec, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made, mixed = kernels(spec, dtype), torch.randn(100, width(spec)).to(dtype)
    steps = [(31, 31), (31, 31), (5, 3), (4, 0), (0, 0), (1, 1), (3, 2)]
    caches = [random_states(spec, dtype, draft_places=2) for _ in made]
    expected, actual = (
        run_with_drafts(kernel, spec, mixed, cache, steps) for kernel, cache in zip(made, caches, strict=True)
    )
    assert_close(actual, expected, dtype)
    for one, other in zip(*(cache.tensors for cache in caches), strict=True):
        torch.testing.assert_close(one[2], other[2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", [DELTA, CONVOLUTION])
def test_chunks_of_64_rows_leave_equal_bits(isa: str, spec: StateSpec) -> None:
    kernel, mixed = kernels(spec, torch.bfloat16)[1], torch.randn(140, width(spec)).bfloat16()
    whole = random_states(spec, torch.bfloat16)
    cut = copied(whole)

    def run(cache: StateCache, start: int, end: int) -> Tensor:
        return kernel(*inputs_of(spec, mixed[start:end]), cache, StateRows.of(Segments.of_chunks([(start, end)], [1])))

    outputs = [run(cut, 0, 64), run(cut, 64, 128), run(cut, 128, 140)]
    assert torch.equal(torch.cat(outputs), run(whole, 0, 140))
    for one, other in zip(whole.tensors, cut.tensors, strict=True):
        assert torch.equal(one[1], other[1])


def test_segment_without_rows_copies_its_source(isa: str) -> None:
    for spec in (DELTA, CONVOLUTION):
        cache = random_states(spec, torch.float32)
        rows = StateRows.of(Segments.of_chunks([(7, 7), (0, 0)], [1, 2], {0: 5}))
        kernels(spec, torch.float32)[1](*inputs_of(spec, torch.empty(0, width(spec))), cache, rows)
        for tensor in cache.tensors:
            assert torch.equal(tensor[1], tensor[5])
            assert not tensor[2].any()


def test_steps_without_sequences_change_nothing(isa: str) -> None:
    rows = StateRows.of(Segments.of_chunks([], []))
    for spec in (DELTA, CONVOLUTION):
        cache = random_states(spec, torch.float32)
        before = copied(cache)
        assert len(kernels(spec, torch.float32)[1](*inputs_of(spec, torch.empty(0, width(spec))), cache, rows)) == 0
        for tensor, old in zip(cache.tensors, before.tensors, strict=True):
            assert torch.equal(tensor, old)


@pytest.mark.parametrize("spec", [DELTA, CONVOLUTION])
def test_program_equals_its_kernel_alone(spec: StateSpec) -> None:
    kernel, cache = kernels(spec, torch.bfloat16)[1], random_states(spec, torch.bfloat16)
    rows = StateRows.of(Segments.of_chunks([(5, 6), (0, 70)], [1, 2]))
    alone, x = copied(cache), torch.randn(71, 32).bfloat16()
    device = NativeCpuDevice(CPU, selected_isa())
    products = [
        device.linear(weight.contiguous(), None, Epilogue(None), torch.bfloat16)
        for weight in (part.T for part in inputs_of(spec, torch.randn(32, width(spec)).bfloat16() / 6))
    ]
    expected = kernel(*(product(x) for product in products), alone, rows)
    recording = Recording(32, torch.bfloat16)
    program = recording.finish(kernel(*(product(recording.input) for product in products), cache, rows))
    plan = CpuPlan((), (0,) * 5, 0, 2, 71, 0, 0, torch.get_num_threads(), addresses_of(rows))
    assert torch.equal(program.run(x, [], plan), expected)
    for one, other in zip(cache.tensors, alone.tensors, strict=True):
        assert torch.equal(one[1:], other[1:])


def test_large_gates_stay_finite() -> None:
    """Inputs whose exponentials would overflow, and states that decay to nothing."""
    kernel, cache = kernels(DELTA, torch.float32)[1], random_states(DELTA, torch.float32)
    mixed = torch.randn(70, width(DELTA))
    mixed[::2, DELTA.channels :] = 200
    mixed[1::2, DELTA.channels :] = -200
    output = kernel(*inputs_of(DELTA, mixed), cache, StateRows.of(Segments.of_chunks([(1, 70), (4, 5)], [1, 2])))
    assert output.isfinite().all()
    assert cache.states is not None
    assert cache.states.isfinite().all()


def test_unsupported_layers_have_a_reason() -> None:
    assert unsupported_reason(DELTA, torch.float32) is None
    assert "float16" in str(unsupported_reason(CONVOLUTION, torch.float16))
    assert "wider than 8" in str(unsupported_reason(ConvolutionSpec(16, 9), torch.float32))
    small = DeltaSpec(num_key_heads=2, num_value_heads=2, key_size=8, value_size=16, kernel=4)
    assert "no multiples of 16" in str(unsupported_reason(small, torch.float32))
    with pytest.raises(ValueError, match="no multiples of 16"):
        NativeDelta(small, DeltaWeights(*[torch.empty(0)] * 4, 1e-6), torch.float32)
    with pytest.raises(ValueError, match="does not fit"):
        kernels(DELTA, torch.float32)[1](
            *inputs_of(DELTA, torch.empty(2, width(DELTA))),
            random_states(DELTA, torch.float32),
            StateRows.of(Segments.of_chunks([(0, 1)], [1])),
        )
