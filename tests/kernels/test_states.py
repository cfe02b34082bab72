"""Layers with states: torch's reference against transformers and a recurrence in float64."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from tests.state_rows import inputs_of, run_with_drafts, width
from vlmserve.kernels.blocks import allocate_states, copy_blocks
from vlmserve.kernels.states import DeltaWeights, Segments, StateCache, StateRows
from vlmserve.kernels.torch_states import RuleRows, TorchConvolution, TorchDelta, chunked_rule, recurrent_rule
from vlmserve.layer_specs import MAX_STATE_DRAFTS, NO_SLOT, ConvolutionSpec, DeltaSpec

CPU = torch.device("cpu")
DELTA = DeltaSpec(num_key_heads=2, num_value_heads=4, key_size=8, value_size=6, kernel=4)
CONVOLUTION = ConvolutionSpec(channels=10, kernel=3)
SPECS = (DELTA, CONVOLUTION)
SLOTS = 12


def kernel(spec: DeltaSpec | ConvolutionSpec) -> Any:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if isinstance(spec, ConvolutionSpec):
        return TorchConvolution(drawn(spec.channels, spec.kernel))
    heads = spec.num_value_heads
    weights = DeltaWeights(
        drawn(spec.channels, spec.kernel), -drawn(heads).exp(), drawn(heads), drawn(spec.value_size), 1e-6
    )
    return TorchDelta(spec, weights)


def caches(spec: DeltaSpec | ConvolutionSpec, dtype: torch.dtype = torch.float32) -> StateCache:
    """Slots full of NaN, so that whatever reads a slot that it should not shows."""
    [cache] = allocate_states([spec], SLOTS, dtype, CPU, draft_places=2)
    assert cache.drafts is not None
    for tensor in (*cache.tensors, cache.drafts):
        tensor.fill_(torch.nan)
    return cache


def rows_of(
    chunks: Sequence[tuple[int, int]],
    slots: Sequence[int],
    sources: Mapping[int, int] | None = None,
    checkpoints: Mapping[int, Mapping[int, int]] | None = None,
) -> StateRows:
    return StateRows.of(Segments.of_chunks(chunks, slots, sources, checkpoints))


def inputs(tokens: int, heads: int = 3, seed: int = 0) -> RuleRows:
    generator = torch.Generator().manual_seed(seed)
    query, key = F.normalize(torch.randn(2, tokens, heads, 8, generator=generator), dim=-1)
    value = torch.randn(tokens, heads, 5, generator=generator)
    decay = -F.softplus(torch.randn(tokens, heads, generator=generator))
    return RuleRows(query, key, value, decay, torch.rand(tokens, heads, generator=generator))


def test_chunks_equal_those_of_transformers() -> None:
    rows, state = inputs(64), torch.randn(3, 8, 5)
    output, after = chunked_rule(rows._replace(query=rows.query * 8**-0.5), state)
    expected, expected_after = qwen.torch_chunk_gated_delta_rule(
        *(one[None] for one in rows), initial_state=state[None], output_final_state=True
    )
    torch.testing.assert_close(output, expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(after, expected_after[0], atol=1e-5, rtol=1e-4)


def test_decodes_equal_those_of_transformers() -> None:
    rows, states = inputs(7), torch.randn(7, 3, 8, 5)
    output, after = recurrent_rule(rows._replace(query=rows.query * 8**-0.5), states)
    expected, expected_after = qwen.torch_recurrent_gated_delta_rule(
        *(one[:, None] for one in rows), initial_state=states, output_final_state=True
    )
    torch.testing.assert_close(output, expected[:, 0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(after, expected_after, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 37, 64])
def test_chunks_equal_the_recurrence_in_float64(tokens: int) -> None:
    exact = RuleRows(*(one.double() for one in inputs(tokens, seed=tokens)))
    states = torch.randn(1, 3, 8, 5, dtype=torch.float64)
    output, after = chunked_rule(RuleRows(*(one.float() for one in exact)), states[0].float())
    for token in range(tokens):
        expected, states = recurrent_rule(exact.rows(token, token + 1), states)
        torch.testing.assert_close(output[token], expected[0].float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(after, states[0].float(), atol=1e-5, rtol=1e-4)


def test_layer_equals_that_of_transformers() -> None:
    """Everything between the projections: convolution, norms of queries and keys, gates, rule and gated norm."""
    config = qwen.Qwen3_5TextConfig(
        hidden_size=16,
        num_hidden_layers=1,
        linear_num_key_heads=DELTA.num_key_heads,
        linear_num_value_heads=DELTA.num_value_heads,
        linear_key_head_dim=DELTA.key_size,
        linear_value_head_dim=DELTA.value_size,
    )
    torch.manual_seed(0)
    layer = qwen.Qwen3_5GatedDeltaNet(config, 0).float()
    torch.nn.init.normal_(layer.norm.weight)
    torch.nn.init.normal_(layer.dt_bias)
    hidden = torch.randn(90, 16)
    weights = DeltaWeights(
        layer.conv1d.weight[:, 0], -layer.A_log.exp(), layer.dt_bias, layer.norm.weight, config.rms_norm_eps
    )
    projections = (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
    with torch.no_grad():
        mixed = torch.cat([projection(hidden) for projection in projections], 1)
        rule = TorchDelta(DELTA, weights)(*inputs_of(DELTA, mixed), caches(DELTA), rows_of([(0, 90)], [1]))
        output = layer.out_proj(rule)
        torch.testing.assert_close(output, layer(hidden[None])[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS, ids=["delta", "convolution"])
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_results_depend_on_no_division_into_chunks(spec: DeltaSpec | ConvolutionSpec, data: st.DataObject) -> None:
    """Sequences in random chunks with checkpoints, beside others, against each sequence at once. Each goes on from its
    last checkpoint at times, as after a hit."""
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3))
    mixed = [torch.randn(length, width(spec)) for length in lengths]
    made, cache, alone = kernel(spec), caches(spec), caches(spec)
    expected = [made(*inputs_of(spec, rows), alone, rows_of([(0, len(rows))], [1])) for rows in mixed]
    done, sources = [0] * len(lengths), dict.fromkeys(range(len(lengths)), NO_SLOT)
    while any(before < length for before, length in zip(done, lengths, strict=True)):
        steps = []
        for sequence, (before, length) in enumerate(zip(done, lengths, strict=True)):
            if before < length:
                end = data.draw(st.sampled_from([before + 1, length]) | st.integers(before + 1, length))
                steps.append((sequence, before, end))
        steps.sort(key=lambda step: step[2] - step[1] > 1)
        kept = [data.draw(st.none() | st.integers(before + 1, end)) for _, before, end in steps]
        rows = rows_of(
            [(before, end) for _, before, end in steps],
            [1 + sequence for sequence, _, _ in steps],
            {index: sources[step[0]] for index, step in enumerate(steps)},
            {index: {at: 5 + steps[index][0]} for index, at in enumerate(kept) if at is not None},
        )
        taken = torch.cat([mixed[number][before:end] for number, before, end in steps])
        output = made(*inputs_of(spec, taken), cache, rows)
        for (number, before, end), part in zip(
            steps, output.split([end - first for _, first, end in steps]), strict=True
        ):
            torch.testing.assert_close(part, expected[number][before:end], atol=1e-4, rtol=1e-4)
            done[number], sources[number] = end, 1 + number
        for (number, _, _), at in zip(steps, kept, strict=True):
            if at is not None and data.draw(st.booleans()):
                done[number], sources[number] = at, 5 + number


@pytest.mark.parametrize("spec", SPECS, ids=["delta", "convolution"])
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_only_accepted_drafts_change_states(spec: DeltaSpec | ConvolutionSpec, data: st.DataObject) -> None:
    mixed, made = torch.randn(data.draw(st.integers(1, 90)), width(spec)), kernel(spec)
    whole, cache = caches(spec), caches(spec)
    expected = made(*inputs_of(spec, mixed), whole, rows_of([(0, len(mixed))], [2]))
    steps = data.draw(st.lists(st.tuples(st.integers(0, MAX_STATE_DRAFTS), st.integers(0, MAX_STATE_DRAFTS))))
    torch.testing.assert_close(run_with_drafts(made, spec, mixed, cache, steps), expected, atol=1e-4, rtol=1e-4)
    for one, other in zip(whole.tensors, cache.tensors, strict=True):
        torch.testing.assert_close(one[2], other[2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS, ids=["delta", "convolution"])
def test_chunks_of_64_rows_leave_equal_bits(spec: DeltaSpec | ConvolutionSpec, dtype: torch.dtype) -> None:
    mixed, made = torch.randn(200, width(spec)).to(dtype), kernel(spec)
    whole, cut = caches(spec, dtype), caches(spec, dtype)
    expected = made(*inputs_of(spec, mixed), whole, rows_of([(0, 200)], [1]))
    outputs, source = [], NO_SLOT
    for start, end in itertools.pairwise([0, 64, 192, 200]):
        outputs.append(made(*inputs_of(spec, mixed[start:end]), cut, rows_of([(start, end)], [1], {0: source})))
        source = 1
    assert torch.equal(torch.cat(outputs), expected)
    for one, other in zip(whole.tensors, cut.tensors, strict=True):
        assert torch.equal(one[1], other[1])


def test_checkpoint_at_the_end_leaves_two_equal_states() -> None:
    cache = caches(DELTA)
    rows = rows_of([(0, 5)], [1], checkpoints={0: {3: 6, 5: 7}})
    kernel(DELTA)(*inputs_of(DELTA, torch.randn(5, width(DELTA))), cache, rows)
    for tensor in cache.tensors:
        assert torch.equal(tensor[1], tensor[7])
        assert not torch.equal(tensor[1], tensor[6])
        assert tensor[[2, 3, 4, 5, 8]].isnan().all()


def test_segments_follow_working_slots_and_checkpoints() -> None:
    segments = Segments.of_chunks([(9, 10), (70, 90), (0, 6)], [3, 4, 5], {1: 8}, {1: {80: 9}})
    assert segments.starts.tolist() == [0, 1, 11, 21, 27]
    assert segments.sources.tolist() == [3, 8, 9, NO_SLOT]
    assert segments.targets.tolist() == [3, 9, 4, 5]
    assert segments.positions.tolist() == [9, 70, 80, 0]
    assert segments.sequences.tolist() == [0, 1, 3, 4]
    assert StateRows.of(segments).num_decodes == 1
    assert all(array.flags.c_contiguous for array in segments if array is not None)


@pytest.mark.parametrize(
    ("chunks", "checkpoints", "decodes"),
    [([(4, 5), (0, 1)], {}, 2), ([(4, 5)], {0: {5: 9}}, 0), ([(4, 6)], {}, 0), ([(4, 5), (4, 6), (8, 9)], {}, 1)],
)
def test_decodes_are_leading_single_rows(
    chunks: list[tuple[int, int]], checkpoints: dict[int, dict[int, int]], decodes: int
) -> None:
    slots = list(range(1, len(chunks) + 1))
    assert rows_of(chunks, slots, checkpoints=checkpoints).num_decodes == decodes


def test_slots_are_copied_as_they_were() -> None:
    [cache] = allocate_states([DELTA], SLOTS, torch.float32, CPU)
    for tensor in cache.tensors:
        tensor.copy_(torch.randn_like(tensor))
    before = [tensor.clone() for tensor in cache.tensors]
    copy_blocks(cache, cache, torch.tensor([1, 2]), torch.tensor([2, 3]))
    for tensor, old in zip(cache.tensors, before, strict=True):
        assert torch.equal(tensor[:4], old[[0, 1, 1, 2]])


def test_states_take_the_bytes_of_their_tensors() -> None:
    """Qwen3.5-4B has 24 layers and 51.5 MB of states."""
    layer = DeltaSpec(num_key_heads=16, num_value_heads=32, key_size=128, value_size=128, kernel=4)
    assert round(24 * layer.state_bytes(2) / 1e5) == 515
    for spec in (DELTA, CONVOLUTION):
        for dtype in (torch.float32, torch.bfloat16):
            [cache] = allocate_states([spec], SLOTS, dtype, CPU)
            assert sum(tensor.nbytes for tensor in cache.tensors) == SLOTS * spec.state_bytes(dtype.itemsize)
