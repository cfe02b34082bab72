"""Batches as the runner packs them, against packing each from nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.scheduler.made_up import BLOCK, image, request, request_states, sampled, scheduler
from vlmserve.devices.device import Device
from vlmserve.devices.staging import Staging
from vlmserve.runner.batch import Batch, BatchBuilder
from vlmserve.runner.requests import RequestStates, ScheduledRequest
from vlmserve.scheduler.scheduler import Scheduler
from vlmserve.steps import SchedulerOutput

CPU = torch.device("cpu")


def tokens_of(scheduled: ScheduledRequest) -> range:
    """Their numbers."""
    return range(scheduled.start, scheduled.start + scheduled.num_tokens)


def assert_is(batch: Batch, scheduled: list[ScheduledRequest]) -> None:
    """Of the tokens here, 50 and more are placeholders of an image."""
    counts = [one.num_tokens for one in scheduled]
    contexts = [one.start + one.num_tokens for one in scheduled]
    metadata = batch.metadata
    token_ids = [(one.state.token_ids + one.draft_token_ids)[number] for one in scheduled for number in tokens_of(one)]
    assert batch.token_ids.tolist() == [0 if token >= 50 else token for token in token_ids]
    assert batch.positions.tolist() == [number for one in scheduled for number in tokens_of(one)]
    assert metadata.slot_mapping.tolist() == [
        [
            one.state.block_tables[group][number // BLOCK] * BLOCK + number % BLOCK
            for one in scheduled
            for number in tokens_of(one)
        ]
        for group in range(len(metadata.slot_mapping))
    ]
    assert metadata.query_starts.tolist() == [0, *np.cumsum(counts).tolist()]
    assert metadata.context_lens.tolist() == metadata.host_context_lens == contexts
    assert metadata.query_lens == counts
    assert metadata.num_decodes == counts.count(1)
    is_sampled = [number >= len(one.state.token_ids) - 1 for one in scheduled for number in tokens_of(one)]
    assert batch.sampled_rows.tolist() == np.flatnonzero(is_sampled).tolist()
    assert metadata.block_tables.shape[:2] == (len(scheduled[0].state.block_tables), len(counts))
    for group, rows in enumerate(metadata.block_tables.tolist()):
        for row, one in zip(rows, scheduled, strict=True):
            table = one.state.block_tables[group].tolist()
            assert row[: len(table)] == table
            assert not any(row[len(table) :])


def with_a_second_group(step: SchedulerOutput) -> SchedulerOutput:
    """The step with other blocks for a second cache group."""
    return replace(
        step,
        new_requests=[
            replace(new, block_ids=[*new.block_ids, [100 + block for block in new.block_ids[0]]])
            for new in step.new_requests
        ],
        cached_requests=[
            cached
            if not cached.new_block_ids
            else replace(
                cached,
                new_block_ids=(*cached.new_block_ids, tuple(100 + block for block in cached.new_block_ids[0])),
            )
            for cached in step.cached_requests
        ],
    )


def run(
    made_up: Scheduler, states: RequestStates, builder: BatchBuilder, *, padded: bool = False, groups: int = 1
) -> tuple[Batch, list[ScheduledRequest]]:
    """The batch of the next step, after which every request has a token, or several where drafts are right."""
    step = made_up.schedule()
    scheduled = states.update(step if groups == 1 else with_a_second_group(step))
    batch = builder.build(scheduled)
    if not padded:
        assert_is(batch, scheduled)
    output = sampled(made_up, step, token=7)
    for one in scheduled:
        for token in output.token_ids.get(one.state.request_id, ()):
            one.state.append(token)
    made_up.update(step, output)
    return batch, scheduled


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=4, max_size=12),
    num_blocks=st.integers(22, 34),
    budget=st.integers(3, 40),
    prefix_caching=st.booleans(),
    aborted=st.sets(st.integers(0, 11), max_size=4),
    drafts=st.sampled_from([None, [7], [7, 7, 6, 7]]),
    groups=st.integers(1, 2),
    data=st.data(),
)
def test_whatever_happened_before_a_batch_is_its_step(
    lengths: list[int], num_blocks: int, budget: int, prefix_caching: bool, aborted: set[int],
    drafts: list[int] | None, groups: int, data: st.DataObject,
) -> None:  # fmt: skip
    """Requests come and go, are preempted and are aborted, and some of their drafts are right."""
    made_up = scheduler(num_blocks=num_blocks, budget=budget, prefix_caching=prefix_caching)
    made_up.propose_drafts = drafts and (lambda request: drafts)
    builder = BatchBuilder(BLOCK, Device(torch.device("cpu")), num_columns=groups)
    states = request_states()
    for number, length in enumerate(lengths):
        made_up.add(request(str(number), length, token=number + 1, max_tokens=5 + (7 * number) % 40))
    for number in range(400):
        if not len(made_up):
            break
        run(made_up, states, builder, groups=groups)
        if number in aborted:
            made_up.abort([data.draw(st.sampled_from([str(number) for number in range(len(lengths))]))])
    assert not len(made_up)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 40])
def test_text_inside_images_survives_chunks(budget: int) -> None:
    places = (0, 1, 4, 7, 8, 11)
    shown = replace(image(1, 12), text=tuple((place, 20 + place) for place in places))
    made_up = scheduler(budget=budget)
    made_up.add(seen := request("seen", 18, token=50, images=[(shown, 3)], max_tokens=1))
    for place, token in shown.text:
        seen.token_ids[3 + place] = token
    seen.token_ids[:3] = seen.token_ids[15:] = [1, 2, 3]
    builder, states = BatchBuilder(BLOCK, Device(torch.device("cpu"))), request_states()
    tokens: list[int] = []
    taken: dict[int, int] = {}
    while len(made_up):
        batch, _ = run(made_up, states, builder)
        for rows in batch.image_rows:
            for row in range(rows.first, rows.last):
                taken[len(tokens) + row] = rows.offset + row - rows.first
        tokens += batch.token_ids.tolist()
    # Placeholders are 0 in a batch; their embeddings are those of the image, one after the other.
    placeholders = [3 + place for place in range(12) if place not in places]
    assert taken == {position: row for row, position in enumerate(placeholders)}
    assert tokens == [0 if position in taken else token for position, token in enumerate(seen.token_ids[:18])]


def test_image_rows_say_their_image_and_offset() -> None:
    made_up = scheduler(budget=6)
    one, two = image(1, 5), image(2, 3)
    made_up.add(seen := request("seen", 14, images=[(one, 2), (two, 9)]))
    seen.token_ids[2:7], seen.token_ids[9:12] = [50] * 5, [50] * 3
    builder, states = BatchBuilder(BLOCK, Device(torch.device("cpu"))), request_states()
    rows = []
    while len(made_up):
        batch, _ = run(made_up, states, builder)
        rows.append([(row.key[0], row.first, row.last, row.offset) for row in batch.image_rows])
    # Chunks of 6, 6 and 2 tokens, then two more tokens of the answer.
    assert rows == [[(1, 2, 6, 0)], [(1, 0, 1, 4), (2, 3, 6, 0)], [], [], []]


class PaddingDevice(Device):
    """Pads decodes, and chunks of up to 16 rows, to a multiple of four."""

    padding_blocks = 1

    def padded_rows(self, num_rows: int, num_decodes: int) -> int | None:
        return -(-num_rows // 4) * 4 if num_decodes == num_rows or num_rows <= 16 else None


class StagingDevice(PaddingDevice):
    """Uploads to the same memory in each step."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.upload = Staging(self.torch_device, reserve=2**16).upload  # type: ignore[method-assign]


def test_decodes_lie_at_the_same_addresses() -> None:
    device, places = StagingDevice(), set()
    builder = BatchBuilder(BLOCK, device, padding_block=77)
    for lengths in ((3, 2, 5), (60, 3, 2)):
        made_up, states = scheduler(budget=100), request_states()
        for number, length in enumerate(lengths):
            made_up.add(request(str(number), length, token=number + 1, max_tokens=4))
        run(made_up, states, builder, padded=True)
        batch, _ = run(made_up, states, builder, padded=True)
        places.add(tuple(addresses(batch)))
    assert len(places) == 1


def test_a_scaling_pass_is_uploaded_with_the_first() -> None:
    """Both passes of a captured step find their arrays where they were, though block tables grow."""
    device, places, num_uploads = StagingDevice(), set(), 0
    upload = device.upload

    def counted(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        nonlocal num_uploads
        num_uploads += 1
        return upload(arrays)

    device.upload = counted  # type: ignore[method-assign]
    builder, states = BatchBuilder(BLOCK, device, padding_block=77), request_states()
    made_up = scheduler(budget=100)
    for number, length in enumerate((5 * BLOCK, 3)):
        made_up.add(request(str(number), length, token=number + 1, max_tokens=3 * BLOCK))
    num_steps = 0
    while len(made_up):
        step = made_up.schedule()
        scheduled = states.update(with_a_second_group(step))
        if scheduled:
            num_steps += 1
            batch = builder.build(scheduled, mixed=(mixed := scheduled[1:] or scheduled))
            scaling = batch.scaling_pass
            assert scaling is not None
            assert_holds(scaling, mixed, table=1)
            assert_holds(batch, scheduled, table=0)
            if batch.metadata.num_decodes == len(batch.metadata.query_lens):
                places.add(tuple(address for one in (batch, scaling) for address in addresses(one)))
        made_up.update(step, sampled(made_up, step, token=7))
        for one in scheduled:
            one.state.append(7)
    assert num_uploads == num_steps > 3 * BLOCK - 2
    assert len(places) == 1


def assert_holds(batch: Batch, scheduled: list[ScheduledRequest], *, table: int) -> None:
    """Rows of the requests, which padding follows, write to the slots of that block table."""
    slots = [
        one.state.block_tables[table][number // BLOCK] * BLOCK + number % BLOCK
        for one in scheduled
        for number in tokens_of(one)
    ]
    assert batch.metadata.slot_mapping[0, : len(slots)].tolist() == slots
    assert batch.positions[: len(slots)].tolist() == [number for one in scheduled for number in tokens_of(one)]
    for row, one in zip(batch.metadata.block_tables[0].tolist(), scheduled, strict=False):
        assert row[: len(one.state.block_tables[table])] == one.state.block_tables[table].tolist()


def addresses(batch: Batch) -> list[int]:
    metadata = batch.metadata
    read = (metadata.query_starts, metadata.context_lens, metadata.slot_mapping, metadata.block_tables)
    return [tensor.data_ptr() for tensor in (*read, batch.positions)]


def test_decodes_are_padded_by_one_token_sequences() -> None:
    made_up = scheduler(budget=40)
    for number, length in enumerate((5, 9, 3)):
        made_up.add(request(str(number), length, token=number + 1, max_tokens=4))
    builder = BatchBuilder(BLOCK, PaddingDevice(torch.device("cpu")), padding_block=77)
    states = request_states()
    prompts, _ = run(made_up, states, builder)
    assert len(prompts.token_ids) == 17, "17 rows of prompts are not padded"
    while len(made_up):
        batch, scheduled = run(made_up, states, builder, padded=True)
        count, metadata = len(scheduled), batch.metadata
        assert len(batch.token_ids) == len(batch.positions) == metadata.num_decodes == len(metadata.query_lens) == 4
        assert metadata.query_starts.tolist() == [0, 1, 2, 3, 4]
        assert metadata.context_lens.tolist() == metadata.host_context_lens
        assert metadata.host_context_lens[count:] == [1] * (4 - count)
        assert metadata.slot_mapping[0, count:].tolist() == [77 * BLOCK] * (4 - count)
        assert metadata.block_tables[0, count:, 0].tolist() == [77] * (4 - count)
        assert metadata.block_tables.shape[2] == max(len(one.state.block_tables[0]) for one in scheduled)
        assert batch.positions[count:].tolist() == [0] * (4 - count)
        assert batch.sampled_rows.tolist() == list(range(count))


def test_mixed_batches_are_padded() -> None:
    made_up = scheduler(budget=16)
    builder = BatchBuilder(BLOCK, PaddingDevice(torch.device("cpu")), padding_block=77)
    states = request_states()
    for number in range(2):
        made_up.add(request(str(number), 3, token=number + 1, max_tokens=9))
    run(made_up, states, builder, padded=True)
    made_up.add(request("late", 8, token=3, max_tokens=2))
    batch, scheduled = run(made_up, states, builder, padded=True)
    metadata = batch.metadata
    assert batch.is_repeatable
    assert (metadata.num_decodes, metadata.query_lens) == (2, [1, 1, 8, 2])
    assert metadata.decodes is not None
    assert metadata.decodes.tolist() == [2]
    assert metadata.query_starts.tolist() == [0, 1, 2, 10, 12]
    assert metadata.slot_mapping[0, 10:].tolist() == [77 * BLOCK] * 2
    assert batch.sampled_rows.tolist() == [0, 1, 9]
    made_up.add(request("later", 9, token=4, max_tokens=2))
    batch, scheduled = run(made_up, states, builder, padded=True)
    assert batch.metadata.query_lens == [1, 1, 1, 9, 0, 0, 0, 0], "as many sequences as 8"
    assert batch.metadata.query_starts.tolist() == [0, 1, 2, 3, 12, 12, 12, 12, 12]
    assert batch.metadata.context_lens.tolist()[4:] == [0] * 4
    assert len(scheduled) == 4


def test_chunks_are_padded_by_one_sequence() -> None:
    made_up = scheduler(budget=40)
    for number, length in enumerate((5, 6)):
        made_up.add(request(str(number), length, token=number + 1, max_tokens=1))
    builder = BatchBuilder(2, PaddingDevice(torch.device("cpu")), padding_block=77)
    batch, _ = run(made_up, request_states(), builder, padded=True)
    metadata = batch.metadata
    assert batch.is_repeatable
    assert (metadata.num_decodes, metadata.query_lens, metadata.host_context_lens) == (0, [5, 6, 1], [5, 6, 1])
    assert metadata.query_starts.tolist() == [0, 5, 11, 12]
    assert metadata.slot_mapping[0, 11:].tolist() == [77 * 2]
    assert metadata.block_tables[0, 2, 0] == 77
    assert batch.sampled_rows.tolist() == [4, 10]
