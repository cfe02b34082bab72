"""Threads that clients share fairly."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest

from vlmserve.errors import UnavailableError
from vlmserve.sampling.fair_workers import FairWorkers


def test_client_with_least_time_goes_first() -> None:
    workers = FairWorkers("test", 1)
    order: list[str] = []
    begin = threading.Event()

    def work(name: str) -> None:
        begin.wait(10)
        order.append(name)

    flood = [workers.submit("flood", lambda: work("flood")) for _ in range(10)]
    honest = [workers.submit("honest", lambda: work("honest")) for _ in range(2)]
    begin.set()
    wait([*flood, *honest], 10)
    assert "honest" in order[1:3]
    assert order.count("flood") == 10


def test_cheap_work_of_a_client_goes_first() -> None:
    workers = FairWorkers("test", 1)
    order: list[float] = []
    begin = threading.Event()
    first = workers.submit("a", lambda: begin.wait(10))
    rest = [workers.submit("a", lambda cost=cost: order.append(cost), cost) for cost in (3.0, 1.0, 2.0)]
    begin.set()
    wait([first, *rest], 10)
    assert order == [1.0, 2.0, 3.0]


def test_client_leaves_threads_to_others() -> None:
    workers = FairWorkers("test", 3, per_client=2)
    release = threading.Event()
    flood = [workers.submit("flood", lambda: release.wait(30)) for _ in range(5)]
    assert workers.submit("honest", lambda: "done").result(10) == "done"
    release.set()
    wait(flood, 10)


def test_errors_and_cancelled_work_leave_threads_free() -> None:
    workers = FairWorkers("test", 1)
    release = threading.Event()
    running = workers.submit("a", lambda: release.wait(10))
    failing = workers.submit("a", lambda: 1 // 0)
    cancelled = workers.submit("a", lambda: "never")
    last = workers.submit("b", lambda: "done")
    assert cancelled.cancel()
    release.set()
    assert running.result(10)
    with pytest.raises(ZeroDivisionError):
        failing.result(10)
    assert last.result(10) == "done"


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmserve.sampling.fair_workers.IDLE_SECONDS", 0.01)
    workers = FairWorkers("ends-when-idle", 2)
    assert workers.submit("a", lambda: 1).result(10) == 1
    for thread in threading.enumerate():
        if thread.name == "ends-when-idle":
            thread.join(10)
            assert not thread.is_alive()
    assert workers.submit("a", lambda: 2).result(10) == 2


def test_work_survives_failed_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = FairWorkers("test", 2)
    release = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        alone = workers.submit("a", lambda: "never")
    assert isinstance(alone.exception(10), UnavailableError)
    first = workers.submit("a", lambda: release.wait(10))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        second = workers.submit("a", lambda: "second")
    release.set()
    assert first.result(10)
    assert second.result(10) == "second"
