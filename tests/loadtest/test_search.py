"""The search for the highest rate, on servers whose highest rate is known."""

from __future__ import annotations

import math

import pytest

from vlmserve.loadtest.search import LOWEST_RATE, Trial, best, find_rate


async def search(limit: float, start: float = 1.0, precision: float = 0.05, **options) -> list[Trial]:
    async def attempt(rate: float) -> Trial:
        return Trial(rate, rate <= limit, 1.0, 20)

    return await find_rate(attempt, start=start, precision=precision, **options)


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.3, 900.0])
@pytest.mark.parametrize("start", [0.5, 20.0])
async def test_the_highest_rate_is_found(limit, start):
    trials = await search(limit, start)
    assert limit / 1.05 <= best(trials).rate <= limit
    assert len(trials) <= 2 * abs(math.log2(limit / start)) + 8


async def test_a_server_that_keeps_nothing_ends_the_search():
    trials = await search(0.0)
    assert best(trials) is None
    assert trials[-1].rate >= LOWEST_RATE


async def test_unlimited_server_ends_the_search_too():
    assert len(await search(math.inf, most=6)) == 6


async def test_it_ends_when_somebody_says_so():
    assert len(await search(10.0, stop=lambda: True)) == 1
