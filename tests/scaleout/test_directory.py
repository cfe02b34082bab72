"""Who belongs to a cluster, without Ray."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("ray")

from vlmserve.scaleout.ray import directory as directory_module
from vlmserve.scaleout.ray.directory import MEMORY, Directory


@pytest.fixture
def now(monkeypatch):
    """A clock; what it says is in the list."""
    times = [100.0]
    monkeypatch.setattr(directory_module.time, "monotonic", lambda: times[0])
    return times


async def test_no_two_members_have_one_name(now):
    directory = Directory("token")
    assert await directory.name("a", "worker") == "worker-0"
    assert await directory.name("b", "worker") == "worker-1"
    assert await directory.name("c", "other") == "other-0"
    await directory.beat("a", "worker", "http://a", "worker-0")
    await directory.leave("b")
    assert await directory.name("d", "worker") == "worker-1"
    now[0] += 2 * MEMORY
    assert await directory.name("e", "worker") == "worker-0", "the one that had it is silent"
    assert await directory.name("f", "worker") == "worker-2", "the one with 1 may still start"


async def test_news_of_members_end_a_wait():
    directory = Directory("token")
    await directory.beat("a", "worker", "http://a", "worker-0")
    assert await directory.next_urls("worker", []) == ["http://a"]
    waiting = asyncio.ensure_future(directory.next_urls("worker", ["http://a"]))
    await asyncio.sleep(0)
    await directory.beat("g", "gateway", "http://g", "")
    await directory.beat("b", "worker", "http://b", "worker-1")
    assert await waiting == ["http://a", "http://b"]
    waiting = asyncio.ensure_future(directory.next_urls("worker", ["http://a", "http://b"]))
    await asyncio.sleep(0)
    await directory.leave("a")
    assert await waiting == ["http://b"]


async def test_restarted_directory_hears_the_names_again(now):
    directory = Directory("token")
    await directory.beat("a", "worker", "http://a", "worker-0")
    await directory.beat("g", "gateway", "http://g", "")
    assert await directory.name("b", "worker") == "worker-1"
    assert await directory.urls("worker") == ["http://a"]
