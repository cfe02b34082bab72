"""Disk entries that count as read once every rank has read its shard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vlmserve.cache.fetches import Plan, Read
from vlmserve.cache.rank_fetches import RankFetches
from vlmserve.cache.tiers import DiskTier, Entries
from vlmserve.steps import DiskLoad, ModelRunnerOutput, SchedulerOutput

BLOCKS, IMAGE, SIZE = [bytes([number]) * 32 for number in range(3)], b"i" * 32, 40


@pytest.fixture
def fetches(tmp_path: Path) -> RankFetches:
    tier = DiskTier(Entries(tmp_path, 2**20), b"rank 0")
    for key in (*BLOCKS, IMAGE):
        tier.store(key, SIZE, lambda: np.zeros(SIZE, np.uint8))
    tier.flush()
    return RankFetches(tier)


def read(read: Read) -> None:
    for key in (*BLOCKS, IMAGE):
        read([key], SIZE)


def begin(fetches: RankFetches, owner: str) -> SchedulerOutput:
    """Return the step after rank 0 has read."""
    fetches.begin(owner, Plan(read, frozenset({IMAGE})))
    assert fetches.wait(60)
    assert not fetches.is_done(owner)
    fetches.end_step(step := SchedulerOutput())
    return step


def test_entries_of_all_ranks_and_images_are_found(fetches: RankFetches) -> None:
    step = begin(fetches, "a")
    assert step.disk_loads == [DiskLoad(1, BLOCKS)]
    fetches.end_step(step := SchedulerOutput())
    assert (step.disk_loads, step.has_work) == ([], True)
    fetches.ran(ModelRunnerOutput())
    assert not fetches.is_done("a")
    assert not fetches.contents
    fetches.ran(ModelRunnerOutput(disk_loads={1: {BLOCKS[0], BLOCKS[2]}}))
    assert fetches.is_done("a")
    assert {*fetches.contents} == {BLOCKS[0], BLOCKS[2], IMAGE}
    fetches.end_step(step := SchedulerOutput())
    assert not step.has_work


def test_images_alone_need_no_other_rank(fetches: RankFetches) -> None:
    fetches.begin("a", Plan(lambda read: read([IMAGE], SIZE) and None, frozenset({IMAGE})))
    assert fetches.wait(60)
    assert fetches.is_done("a")
    assert {*fetches.contents} == {IMAGE}


@pytest.mark.parametrize("ended", [False, True])
def test_later_steps_drop_loads_of_ended_requests(fetches: RankFetches, ended: bool) -> None:
    begin(fetches, "a")
    if ended:
        fetches.ran(ModelRunnerOutput(disk_loads={1: {*BLOCKS}}))
        assert fetches.is_done("a")
    fetches.release("a")
    fetches.end_step(idle := SchedulerOutput())
    assert (idle.has_work, idle.disk_loads_to_drop) == (False, [])
    fetches.end_step(step := SchedulerOutput(blocks_to_zero=[1]))
    assert step.disk_loads_to_drop == [1]
    fetches.ran(ModelRunnerOutput(disk_loads={1: {*BLOCKS}}))
    assert not fetches.contents


def test_admitted_requests_keep_images_alone(fetches: RankFetches) -> None:
    begin(fetches, "a")
    fetches.ran(ModelRunnerOutput(disk_loads={1: {*BLOCKS}}))
    assert fetches.is_done("a")
    fetches.keep("a", {IMAGE})
    assert {*fetches.contents} == {IMAGE}
    fetches.end_step(step := SchedulerOutput(blocks_to_zero=[1]))
    assert step.disk_loads_to_drop == [1]


def test_loads_without_common_shards_are_dropped(fetches: RankFetches) -> None:
    begin(fetches, "a")
    fetches.ran(ModelRunnerOutput(disk_loads={1: set()}))
    assert fetches.is_done("a")
    assert {*fetches.contents} == {IMAGE}
    fetches.end_step(step := SchedulerOutput(blocks_to_zero=[1]))
    assert step.disk_loads_to_drop == [1]


def test_few_loads_are_in_flight(fetches: RankFetches) -> None:
    for owner in ("a", "b"):
        assert fetches.may_begin
        begin(fetches, owner)
    assert not fetches.may_begin
    fetches.release("a")
    assert fetches.may_begin
