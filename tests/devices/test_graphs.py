"""Steps that are captured and repeated, and the memory that they read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.paged import BlockTables
from tests.static_device import repeat_by_calls
from vlmserve.devices.graphs import (
    MOST_GRAPHS,
    MOST_ROWS,
    Captures,
    GraphExecutor,
    TowerGraphs,
    captured_decodes,
    captured_rows,
    captured_sequences,
    captured_width,
)
from vlmserve.devices.staging import ALIGNMENT, Staging
from vlmserve.kernels.adapters import AdapterRows, Change, LinearAdapters, PackedChange, PreparedChange, RowSlots, Run
from vlmserve.kernels.attention import CrossRows, LayerCache
from vlmserve.layers.step import StepContext

CPU = torch.device("cpu")
CACHES = [LayerCache(torch.zeros(4), torch.zeros(4), 4)]


@dataclass(frozen=True)
class Plan:
    capture_key: Hashable = "a step"


def step(plan: object, lengths: Tensor | None = None, **rest: object) -> StepContext:
    metadata = BlockTables([8, 8], 4).metadata([(0, 3, 1), (1, 5, 1)])
    if lengths is not None:
        object.__setattr__(metadata, "context_lens", lengths)
    for name in ("query_starts", "block_tables", "slot_mapping"):
        object.__setattr__(metadata, name, FIXED[name])
    return StepContext(metadata, [], plan, **rest)  # type: ignore[arg-type]


FIXED = {name: torch.zeros(3, dtype=torch.int32) for name in ("query_starts", "block_tables", "slot_mapping")}


def layers(x: Tensor, caches: object, context: StepContext) -> Tensor:
    return x * context.metadata.context_lens[:, None]


def test_repeated_steps_are_captured_and_read_inputs() -> None:
    executor, lengths = GraphExecutor(Captures(repeat_by_calls, repeats=True)), torch.tensor([2, 3])
    for number in range(4):
        lengths.copy_(torch.tensor([number, number + 1]))
        x = torch.full((2, 3), float(number + 1))
        expected = x * lengths[:, None]
        assert torch.equal(executor.run(layers, x, CACHES, step(Plan(), lengths)), expected)
        assert executor.num_captured == (number > 0)


def test_what_changes_addresses_or_keys_is_another_step() -> None:
    executor, lengths = GraphExecutor(Captures(repeat_by_calls, repeats=True)), torch.tensor([2, 3])
    x = torch.ones(2, 3)
    for plan, own in ((Plan(), lengths), (Plan("more splits"), lengths), (Plan(), lengths.clone())):
        executor.run(layers, x, CACHES, step(plan, own))
        assert executor.num_captured == 0
    executor.run(layers, x, CACHES, step(Plan("more splits"), lengths))
    assert executor.num_captured == 1


@pytest.mark.parametrize(
    "kind",
    [
        "prompts", "a plan that says nothing", "factors of queries", "cross-attention", "too many rows",
        "weights that are replaced",
    ],
)  # fmt: skip
def test_other_steps_run_layer_by_layer(kind: str) -> None:
    executor, rows = (
        GraphExecutor(Captures(repeat_by_calls, repeats=True)),
        MOST_ROWS + 1 if kind == "too many rows" else 2,
    )
    lengths = torch.ones(rows, dtype=torch.int64)
    plan: object = {"prompts": Plan(None), "a plan that says nothing": object()}.get(kind, Plan())
    scale = torch.ones(2, 1) if kind == "factors of queries" else None
    cross = [CrossRows(0, 2, torch.zeros(1))] if kind == "cross-attention" else []
    adapters = None
    if kind == "weights that are replaced":
        adapters = AdapterRows(1)
        adapters.unpacked.add(0)
        adapters.set([0], [rows])
    for _ in range(3):
        context = step(plan, lengths, query_scale=scale, adapters=adapters)
        context = replace(context, metadata=replace(context.metadata, cross=cross))
        assert executor.run(layers, torch.ones(rows, 3), CACHES, context).sum() == rows * 3
    assert executor.num_captured == 0


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("1 GiB"), torch.AcceleratorError("CUDA error: out of memory"), MemoryError()],
    ids=["allocator", "instantiation", "host"],
)
def test_captures_end_once_memory_runs_out(caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if executor.num_captured:
            raise error
        return repeat_by_calls(run)

    captures = Captures(capture, repeats=True)
    executor, tower, lengths = GraphExecutor(captures), TowerGraphs(captures), torch.tensor([2, 3])
    for number in range(3):
        for plan in (Plan("first"), Plan("second")):
            x = torch.full((2, 3), float(number))
            assert torch.equal(executor.run(layers, x, CACHES, step(plan, lengths)), x * lengths[:, None])
        assert torch.equal(tower.run(torch.neg, x), -x)
    assert (executor.num_captured, tower.num_captured, captures.is_on) == (1, 0, False)
    assert [record.getMessage().split(":")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        "memory ran out while a step of 2 rows was captured as a graph"
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_only_replays_write_to_a_steps_slots(fails: bool) -> None:
    written = []

    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        run()
        written.append("captured")
        if fails:
            raise torch.OutOfMemoryError("1 GiB")
        return repeat_by_calls(run)

    def writing(x: Tensor, caches: Sequence[LayerCache], context: StepContext) -> Tensor:
        written.append(context.metadata.slot_mapping.tolist())
        return x

    executor, one = GraphExecutor(Captures(capture, repeats=True)), step(Plan(), torch.tensor([2, 3]))
    slots = one.metadata.slot_mapping.tolist()
    for _ in range(2):
        executor.run(writing, torch.ones(2, 3), CACHES, one)
    assert written[0] == written[-1] == slots
    padding = torch.full_like(one.metadata.slot_mapping, 12).tolist()
    assert written[1:-1] == [padding, "captured"], "slots of the last one of four blocks"


def test_other_errors_of_a_capture_are_raised() -> None:
    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    executor, lengths = GraphExecutor(Captures(capture, repeats=True)), torch.tensor([2, 3])
    executor.run(layers, torch.ones(2, 3), CACHES, step(Plan(), lengths))
    with pytest.raises(torch.AcceleratorError):
        executor.run(layers, torch.ones(2, 3), CACHES, step(Plan(), lengths))


@pytest.mark.parametrize("reserved", [None, 16, 32])
def test_adapters_change_the_capture_key(reserved: int | None) -> None:
    executor, lengths, x = (
        GraphExecutor(Captures(repeat_by_calls, repeats=True)),
        torch.tensor([2, 3]),
        torch.ones(2, 3),
    )
    rows, slots = AdapterRows(2), torch.zeros(2, dtype=torch.int32)
    adapters = LinearAdapters(rows, reserved=reserved)

    def counted(scalings: Tensor | None = None) -> int:
        """Graphs, after two steps."""
        rows.use(RowSlots([Run(0, 1, 0)], slots), scalings)
        for _ in range(2):
            executor.run(layers, x, CACHES, step(Plan(), lengths, adapters=rows))
        return executor.num_captured

    def packed(rank: int) -> PreparedChange:
        return PreparedChange(Change(), cast(PackedChange, SimpleNamespace(rank=rank, num_bytes=0, words=(rank,))))

    adapters.set(0, packed(16))
    assert counted() == 1
    slots += 1
    adapters.set(1, packed(16))
    assert counted() == 1, "others of the same rank"
    adapters.set(1, packed(32))
    higher = counted()
    assert higher == (1 if reserved == 32 else 2), "a higher rank"
    assert counted(torch.ones(2, 4)) == higher + 1, "with scalings"
    assert counted(torch.ones(1, 4)) == higher + 1, "those of the last row, which has no adapter, may be missing"
    assert counted(torch.ones(2, 5)) == higher + 2, "with others"
    rows.clear()
    executor.run(layers, x, CACHES, step(Plan(), lengths))
    executor.run(layers, x, CACHES, step(Plan(), lengths))
    assert executor.num_captured == higher + 3, "without any"


def test_the_graphs_that_were_used_last_are_kept() -> None:
    executor, lengths = GraphExecutor(Captures(repeat_by_calls, repeats=True)), torch.tensor([2, 3])
    for number in range(MOST_GRAPHS + 5):
        for _ in range(2):
            executor.run(layers, torch.ones(2, 3), CACHES, step(Plan(number), lengths))
            executor.run(layers, torch.ones(2, 3), CACHES, step(Plan(-1), lengths))
    assert executor.num_captured == MOST_GRAPHS


def test_graphs_captured_at_start_are_kept() -> None:
    captures = Captures(repeat_by_calls, repeats=True)
    executor, lengths = GraphExecutor(captures), torch.tensor([2, 3])
    with captures.at("first"):
        executor.run(layers, torch.ones(2, 3), CACHES, step(Plan("kept"), lengths))
    assert executor.num_captured == 1
    for number in range(MOST_GRAPHS + 5):
        for _ in range(2):
            executor.run(layers, torch.ones(2, 3), CACHES, step(Plan(number), lengths))
    assert executor.num_captured == MOST_GRAPHS + 1
    lengths += 1
    x = torch.full((2, 3), 5.0)
    assert torch.equal(executor.run(layers, x, CACHES, step(Plan("kept"), lengths)), x * lengths[:, None])


@pytest.mark.parametrize("repeats", [False, True])
def test_prompts_are_captured_where_asked_for(repeats: bool) -> None:
    captures = Captures(repeat_by_calls, repeats=repeats)
    executor, lengths = GraphExecutor(captures), torch.tensor([2, 3])
    context = step(Plan(), lengths)
    context = replace(context, metadata=replace(context.metadata, num_decodes=0))
    x = torch.ones(captured_rows(8, 0) or 0, 3)
    for _ in range(3):
        executor.run(lambda x, caches, context: x * 2, x, CACHES, context)
    assert executor.num_captured == repeats
    assert [captures.padded_rows(9, count) for count in (0, 4, 9)] == ([16, 16, 16] if repeats else [None, None, 16])


def test_decodes_are_captured_at_start_alone() -> None:
    captures = Captures(repeat_by_calls)
    executor, lengths = GraphExecutor(captures), torch.tensor([2, 3])
    with captures.at("first"):
        executor.run(layers, torch.ones(2, 3), CACHES, step(Plan("at start"), lengths))
    for _ in range(3):
        for plan in (Plan("at start"), Plan("mixed adapters")):
            executor.run(layers, torch.ones(2, 3), CACHES, step(plan, lengths))
    assert executor.num_captured == 1


def test_captured_sizes_are_padded_to_without_memory() -> None:
    captures = Captures(repeat_by_calls)
    executor, lengths = GraphExecutor(captures), torch.tensor([2, 3])
    with captures.at("first"):
        executor.run(layers, torch.ones(2, 3), CACHES, step(Plan(), lengths))
    captures.is_on = False
    assert [captures.padded_rows(count, count) for count in (1, 2, 3)] == [None, 2, None]


def test_steps_at_start_do_not_count_as_repeated() -> None:
    captures = Captures(repeat_by_calls, repeats=True)
    executor, lengths = GraphExecutor(captures), torch.tensor([2, 3])
    with captures.at("never"):
        for _ in range(3):
            executor.run(layers, torch.ones(2, 3), CACHES, step(Plan(), lengths))
    executor.run(layers, torch.ones(2, 3), CACHES, step(Plan(), lengths))
    assert executor.num_captured == 0


def test_batches_of_decodes_come_in_few_sizes() -> None:
    assert captured_decodes(40) == [48, 32, 16, 8, 4, 2, 1]
    assert [captured_rows(count, count) for count in (1, 2, 3, 5, 8, 9, 16, 17, 500, 512, 513)] == [
        1, 2, 4, 8, 8, 16, 16, 32, 512, 512, None,
    ]  # fmt: skip


def test_chunks_come_in_few_sizes() -> None:
    assert [captured_rows(count, 0) for count in (2, 8, 9, 20, 33, 100, 128)] == [8, 8, 16, 32, 64, 128, 128]
    assert [captured_rows(count, 0) for count in (129, 192, 608, 1000, 1024, 1025)] == [192, 192, 640, 1024, 1024, None]
    assert [captured_rows(count, 1) for count in (3, 20, 130, 512, 513)] == [8, 32, 192, 512, None]
    assert [captured_width(count, is_mixed=False) for count in (1, 2, 3, 9, 70)] == [1, 2, 4, 16, 128]
    assert [captured_width(count, is_mixed=True) for count in (1, 2, 3, 9, 17, 70)] == [1, 4, 4, 16, 64, 256]
    assert [captured_sequences(count) for count in (3, 4, 5, 9, 17, 100)] == [4, 4, 8, 16, 32, 112]


def test_equal_shapes_keep_their_addresses() -> None:
    staging = Staging(CPU, reserve=64)
    places = set()
    for number in range(5):
        arrays = [np.full(3, number, np.int64), np.full((2, 2), number + 1, np.int32), np.empty((0, 4), np.int64)]
        tensors = staging.upload(arrays)
        for array, tensor in zip(arrays, tensors, strict=True):
            assert np.array_equal(tensor.numpy(), array)
            assert tensor.numpy().dtype == array.dtype
            assert tensor.data_ptr() % ALIGNMENT == tensors[0].data_ptr() % ALIGNMENT
        places.add(tuple(tensor.data_ptr() for tensor in tensors[:2]))
    assert len(places) == 1


def test_memory_for_uploads_grows() -> None:
    staging = Staging(CPU, reserve=16)
    values = np.arange(1000)
    assert np.array_equal(staging.upload([values[:1]])[0].numpy(), values[:1])
    (tensor,) = staging.upload([values])
    assert np.array_equal(tensor.numpy(), values)
    values[:] = 0
    assert tensor[999] == 999, "uploaded numbers are not those of the array any more"


def test_uploads_without_memory_leave_earlier_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, empty, places = Staging(CPU, reserve=16), torch.empty, set()

    def full(*shape: int, pin_memory: bool | None = None, **rest: Any) -> Tensor:
        if pin_memory is not None:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return empty(*shape, **rest)

    for number in range(2):
        places.add(staging.upload([np.full(2, number)])[0].data_ptr())
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", full)
            with pytest.raises(torch.AcceleratorError):
                staging.upload([np.arange(100)])
    assert len(places) == 1
    assert torch.equal(staging.upload([np.arange(100)])[0], torch.arange(100))


def test_rows_of_wider_arrays_are_uploaded() -> None:
    wide = np.arange(20, dtype=np.int32).reshape(4, 5)
    (tensor,) = Staging(CPU).upload([wide[1:3, :2]])
    assert tensor.tolist() == [[5, 6], [10, 11]]


def test_towers_are_captured_by_tile_count() -> None:
    sizes: list[int] = []

    def encode(tiles: Tensor) -> Tensor:
        sizes.append(len(tiles))
        return tiles.flatten(1) @ torch.arange(12.0).view(12, 1) * torch.ones(3)

    executor = TowerGraphs(Captures(repeat_by_calls, repeats=True))
    results = []
    for count in (7, 7, 3, 1, 20, 0):
        tiles = torch.randint(-9, 9, (count, 3, 2, 2)).float()
        results.append((executor.run(encode, tiles), encode(tiles)))
        del sizes[-1]
    for ours, expected in results:
        assert torch.equal(ours, expected)
    # The second time that a size comes, it is captured, which calls it; after that it is repeated, which does here too.
    assert sizes == [4, 2, 1, 4, 2, 1, 2, 1, 1, 20, 0]
    assert executor.num_captured == 3


def test_tiles_are_captured_at_start_alone() -> None:
    captures = Captures(repeat_by_calls)
    executor = TowerGraphs(captures)
    with captures.at("first"):
        for count in executor.tile_counts:
            executor.run(torch.neg, torch.zeros(count, 3, 2, 2))
    assert executor.tile_counts == (16, 8, 4, 2, 1)
    assert executor.num_captured == len(executor.tile_counts)
    for _ in range(3):
        tiles, others = torch.randn(7, 3, 2, 2), torch.randn(7, 3, 4, 4)
        assert torch.equal(executor.run(torch.neg, tiles), -tiles)
        assert torch.equal(executor.run(torch.neg, others), -others)
    assert executor.num_captured == len(executor.tile_counts)


def test_graphs_of_tiles_share_their_input() -> None:
    captures, places = Captures(repeat_by_calls), set()
    executor = TowerGraphs(captures)

    def encode(tiles: Tensor) -> Tensor:
        places.add(tiles.data_ptr())
        return -tiles

    tiles = torch.randn(executor.tile_counts[0], 3, 2, 2)
    with captures.at("first"):
        for count in executor.tile_counts:
            assert torch.equal(executor.run(encode, tiles[:count]), -tiles[:count])
    assert len(places) == 1
