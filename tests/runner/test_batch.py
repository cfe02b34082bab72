"""Batches as the runner packs them, against packing each from nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.scheduler.made_up import BLOCK, image, scheduler, sequence
from vlmserve.runner.batch import Batch, BatchBuilder
from vlmserve.scheduler.scheduler import Step

CPU = torch.device("cpu")


def slots_of(step: Step) -> list[int]:
    return [
        chunk.sequence.block_table[token // BLOCK] * BLOCK + token % BLOCK
        for chunk in step.chunks
        for token in range(chunk.sequence.num_computed, chunk.sequence.num_computed + chunk.num_tokens)
    ]


def positions_of(step: Step) -> list[int]:
    return [
        token
        for chunk in step.chunks
        for token in range(chunk.sequence.num_computed, chunk.sequence.num_computed + chunk.num_tokens)
    ]


def tokens_of(step: Step) -> list[int]:
    """Of the tokens here, 50 and more are placeholders of a picture."""
    return [
        0 if token >= 50 else token
        for chunk in step.chunks
        for token in chunk.sequence.token_ids[chunk.sequence.num_computed :][: chunk.num_tokens]
    ]


def assert_is(batch: Batch, step: Step) -> None:
    counts = [chunk.num_tokens for chunk in step.chunks]
    contexts = [chunk.sequence.num_computed + chunk.num_tokens for chunk in step.chunks]
    metadata = batch.metadata
    assert batch.token_ids.tolist() == tokens_of(step)
    assert batch.positions.tolist() == positions_of(step)
    assert metadata.slot_mapping.tolist() == slots_of(step)
    assert metadata.query_starts.tolist() == [0, *np.cumsum(counts).tolist()]
    assert metadata.context_lens.tolist() == metadata.host_context_lens == contexts
    assert metadata.query_lens == counts
    assert metadata.num_decodes == counts.count(1)
    last = [end - 1 for end, chunk in zip(np.cumsum(counts).tolist(), step.chunks, strict=True) if chunk.samples]
    assert batch.sampled_rows.tolist() == last
    assert len(metadata.block_tables) == len(counts)
    for row, chunk in zip(metadata.block_tables.tolist(), step.chunks, strict=True):
        table = chunk.sequence.block_table.tolist()
        assert row[: len(table)] == table
        assert not any(row[len(table) :])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=4, max_size=12),
    num_blocks=st.integers(22, 34),
    budget=st.integers(3, 40),
    prefix_caching=st.booleans(),
    aborted=st.sets(st.integers(0, 11), max_size=4),
    data=st.data(),
)
def test_whatever_happened_before_a_batch_is_its_step(
    lengths: list[int], num_blocks: int, budget: int, prefix_caching: bool, aborted: set[int], data: st.DataObject
) -> None:
    """Sequences come and go, are preempted, start over and are aborted."""
    made_up = scheduler(num_blocks=num_blocks, budget=budget, prefix_caching=prefix_caching)
    builder = BatchBuilder(BLOCK, CPU)
    for number, length in enumerate(lengths):
        made_up.add(sequence(str(number), length, token=number + 1, max_tokens=5 + (7 * number) % 40))
    for number in range(400):
        if not len(made_up):
            break
        step = made_up.schedule()
        assert_is(builder.build(step), step)
        made_up.update(step, [7 for chunk in step.chunks if chunk.samples])
        if number in aborted:
            made_up.abort([data.draw(st.sampled_from([str(number) for number in range(len(lengths))]))])
    assert not len(made_up)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 40])
def test_text_inside_a_picture_is_text_wherever_a_chunk_ends(budget: int) -> None:
    places = (0, 1, 4, 7, 8, 11)
    picture = replace(image(1, 12), text=tuple((place, 20 + place) for place in places))
    made_up = scheduler(budget=budget)
    made_up.add(seen := sequence("seen", 18, token=50, images=[(picture, 3)], max_tokens=1))
    for place, token in picture.text:
        seen.token_ids[3 + place] = token
    builder = BatchBuilder(BLOCK, CPU)
    tokens: list[int] = []
    taken: dict[int, int] = {}
    while len(made_up):
        step = made_up.schedule()
        batch = builder.build(step)
        for rows in batch.image_rows:
            for row in range(rows.first, rows.last):
                taken[len(tokens) + row] = rows.offset + row - rows.first
        tokens += batch.token_ids.tolist()
        made_up.update(step, [7 for chunk in step.chunks if chunk.samples])
    # Placeholders are 0 in a batch; their embeddings are those of the picture, one after the other.
    placeholders = [3 + place for place in range(12) if place not in places]
    assert taken == {position: row for row, position in enumerate(placeholders)}
    assert tokens == [0 if position in taken else token for position, token in enumerate(seen.token_ids[:18])]


def test_rows_of_a_picture_say_whose_they_are_and_from_where() -> None:
    made_up = scheduler(budget=6)
    one, two = image(1, 5), image(2, 3)
    made_up.add(sequence("seen", 14, token=50, images=[(one, 2), (two, 9)]))
    builder = BatchBuilder(BLOCK, CPU)
    rows = []
    while len(made_up):
        step = made_up.schedule()
        batch = builder.build(step)
        rows.append([(row.key[0], row.first, row.last, row.offset) for row in batch.image_rows])
        made_up.update(step, [7 for chunk in step.chunks if chunk.samples])
    # Chunks of 6, 6 and 2 tokens, then two more tokens of the answer.
    assert rows == [[(1, 2, 6, 0)], [(1, 0, 1, 4), (2, 3, 6, 0)], [], [], []]
