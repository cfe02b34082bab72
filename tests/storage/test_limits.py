"""Rate limits that several servers share: nothing that was taken is lost, and it comes back evenly."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import func, select

from vlmserve.storage.limits import Places, Taken
from vlmserve.storage.tables import rate_limits, running_requests


def test_what_was_taken_comes_back_evenly(store, clock):
    take = store.limits.take
    assert take([Taken("a", 60, 10), Taken("b", 6, 4)]) == {"a": 10, "b": 4}
    clock.now += 5
    assert take([Taken("b", 6, 0), Taken("a", 60, 1)]) == {"a": 6, "b": 3.5}
    clock.now += 3600
    assert take([Taken("a", 60, 0)]) == {"a": 0}
    assert take([]) == {}


def test_slow_clock_returns_nothing_twice(store, clock):
    store.limits.take([Taken("a", 60, 50)])
    clock.now += 10
    assert store.limits.take([Taken("a", 60, 0)]) == {"a": 40}
    clock.now -= 10
    assert store.limits.take([Taken("a", 60, 1)]) == {"a": 41}
    clock.now += 10
    assert store.limits.take([Taken("a", 60, 0)]) == {"a": 41}


def test_servers_that_take_at_once_take_everything(open_store):
    stores = [open_store() for _ in range(2)]

    def take(number: int) -> None:
        names = ("a", "b") if number % 2 else ("b", "a")
        stores[number % 2].limits.take([Taken(name, 1000, 1) for name in names])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(take, range(40)))
    assert stores[0].limits.take([Taken("a", 1000, 0), Taken("b", 1000, 0)]) == {"a": 40, "b": 40}


def test_servers_have_what_others_leave_of_the_places(store, clock):
    hold = store.limits.hold
    assert hold("one", [Places("a", 3, 2), Places("b", 1, 1)], 10) == {"a": 2, "b": 1}
    assert hold("two", [Places("b", 1, 1), Places("a", 3, 2)], 10) == {"a": 1, "b": 0}
    assert hold("one", [Places("a", 3, 1)], 10) == {"a": 1}
    assert hold("two", [Places("a", 3, 3)], 10) == {"a": 2}
    assert hold("three", [Places("a", 3, 3), Places("b", 1, 1)], 10) == {"a": 0, "b": 0}
    clock.now += 9
    assert hold("two", [Places("a", 3, 2)], 10) == {"a": 2}
    clock.now += 1
    assert hold("three", [Places("a", 3, 3), Places("b", 1, 1)], 10) == {"a": 1, "b": 1}
    assert hold("one", [Places("b", 1, 1)], 10) == {"b": 0}
    assert hold("one", [], 10) == {}


def test_concurrent_servers_never_exceed_the_slots(open_store):
    stores = [open_store() for _ in range(2)]

    def hold(number: int) -> int:
        names = ("a", "b") if number % 2 else ("b", "a")
        return stores[number % 2].limits.hold(f"{number}", [Places(name, 5, 1) for name in names], 60)["a"]

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(hold, range(20))) == 5


def test_limits_that_nobody_uses_are_forgotten(store, clock):
    store.limits.take([Taken("a", 1, 1), Taken("b", 1, 1)])
    store.limits.hold("gone", [Places("a", 1, 1)], 10)
    clock.now += 24 * 3600
    store.limits.take([Taken("b", 1, 1)])
    clock.now += 1
    assert store.limits.forget() == 1
    clock.now += 10
    store.limits.take([Taken("b", 1, 1)])
    assert store.limits.forget() == 1
    with store.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(rate_limits)).scalar_one() == 1
        assert connection.execute(select(func.count()).select_from(running_requests)).scalar_one() == 0
