"""Percentiles of the last minutes."""

from __future__ import annotations

import random

import pytest

from tests.clock import Clock
from vlmserve.server.recent import Percentiles, RecentLatencies


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def recent(clock):
    return RecentLatencies(clock)


def test_percentiles_are_within_five_percent(recent):
    rng = random.Random(0)
    values = sorted(rng.lognormvariate(-2, 2) for _ in range(1000))
    for value in rng.sample(values, len(values)):
        recent.note("ttft", value)
    shown = recent.percentiles("ttft", 60)
    assert shown.count == 1000
    assert (shown.p50, shown.p90, shown.p99) == pytest.approx((values[499], values[899], values[989]), rel=0.05)


def test_old_windows_are_forgotten_one_by_one(recent, clock):
    recent.note("e2e", 1.0)
    clock.now += 90
    recent.note("e2e", 2.0)
    assert [recent.percentiles("e2e", window).count for window in (60, 300)] == [1, 2]
    clock.now += 250
    assert [recent.percentiles("e2e", window).count for window in (60, 300)] == [0, 1]
    clock.now += 10_000
    assert recent.percentiles("e2e", 300) == Percentiles(0)


def test_kinds_are_counted_apart(recent):
    recent.note("ttft", 1.0)
    assert recent.percentiles("tpot", 300) == Percentiles(0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-9, 1e9])
def test_impossible_latencies_are_still_counted(recent, seconds):
    recent.note("ttft", seconds)
    assert recent.percentiles("ttft", 60).count == 1


def test_memory_stays_bounded_however_many_are_noted(recent, clock):
    for index in range(20_000):
        clock.now += 0.1
        recent.note("ttft", 1e-4 * 1.001**index)
    assert len(recent.slots) == 60
    assert sum(len(slot.counts["ttft"]) for slot in recent.slots) < 60 * 220
