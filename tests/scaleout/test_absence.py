"""Requests wait for a worker when the only one of a model is replaced."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from tests.scaleout.processes import Cluster
from tests.scaleout.test_converge import Cluster as Workers
from tests.scaleout.test_faults import Stream, ask
from tests.waiting import until
from vlmserve.scaleout import absence, proxy
from vlmserve.scaleout.absence import PATIENCE, Absences


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_worker_is_awaited_after_the_last_left():
    clock = Clock()
    absences = Absences(clock)
    assert absences.left("m") == absences.left(None) == 0
    absences.note("m", ["m", "alias"], is_served=True)
    absences.note("other", ["other"], is_served=True)
    assert absences.left("m") == 0
    absences.note("m", ["m", "alias"], is_served=False)
    clock.now += PATIENCE / 4
    absences.note("m", [], is_served=False)
    assert absences.left("m") == absences.left("alias") == pytest.approx(0.75 * PATIENCE)
    assert absences.left("other") == absences.left("unknown") == 0
    assert absences.left(None) == 0, "another model has a worker, which answers what any can"
    absences.note("other", ["other"], is_served=False)
    assert absences.left(None) == pytest.approx(PATIENCE)
    clock.now += PATIENCE
    absences.note("m", [], is_served=False)
    assert absences.left("m") == absences.left(None) == 0
    absences.note("m", ["m"], is_served=True)
    absences.note("m", ["m"], is_served=False)
    assert absences.left("m") == pytest.approx(PATIENCE)
    assert absences.left("alias") == 0


@pytest.fixture(scope="module")
def single(folder):
    # On a busy machine, a worker takes longer to start, and the gateway to hear that one leaves.
    with Cluster(folder, 1, engine={"mock_ttft": 0.1, "mock_tpot": 0.002}, patience=60) as running:
        yield running


async def test_the_only_worker_is_replaced_without_an_error(single):
    """The old one ends before the new one is started; what comes meanwhile waits."""
    streams: list[Stream] = []
    stopped = asyncio.Event()

    async def keep_asking(client: httpx.AsyncClient) -> None:
        while not stopped.is_set():
            streams.append(Stream())
            await ask(client, single.url, len(streams) % 7, streams[-1])

    def replace() -> None:
        name, (old, _) = next(iter(single.workers.items()))
        old.terminate()
        assert old.wait(60) == 0
        del single.workers[name]
        single.tell()
        single.add(f"{name}-new")
        single.wait_for(1)

    async with httpx.AsyncClient(timeout=60) as client:
        tasks = [asyncio.ensure_future(keep_asking(client)) for _ in range(8)]
        for _ in range(2):
            await asyncio.to_thread(replace)
            before = len(streams)
            await until(lambda: len(streams) >= before + 8)  # noqa: B023
        files = asyncio.ensure_future(client.get(f"{single.url}/v1/files"))
        stopped.set()
        await asyncio.gather(*tasks)
        assert (await files).status_code != 503
    assert {(stream.status, stream.error, stream.is_done, stream.failure) for stream in streams} == {
        (200, None, True, "")
    }


async def test_failures_of_others_do_not_reject_a_request(tmp_path, monkeypatch):
    monkeypatch.setattr(proxy, "NEWS", 60.0)
    cluster = Workers(tmp_path)
    first = cluster.start("first")
    gateway = cluster.gateways[0]
    fleet = gateway.model("m")[1].fleet
    worker = fleet.get(gateway.members[first.url].hello.info.id)
    fleet.trip(worker, time.monotonic(), connection=True)
    asking = asyncio.ensure_future(cluster.post("/v1/completions", model="fixed", prompt="x"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not asking.done(), "it waits until it is known whether the worker is leaving"
    cluster.stop("first")
    cluster.start("second")
    answer = await asking
    assert (answer.status_code, answer.text) == (200, "fixed")


async def test_old_failures_reject_a_request_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(proxy, "NEWS", 600.0)
    cluster = Workers(tmp_path)
    cluster.start("first")
    fleet = cluster.gateways[0].model("m")[1].fleet
    for worker in fleet:
        fleet.trip(worker, time.monotonic() + 60, connection=True)
    fleet.failed_at = time.monotonic() - 600
    answer = await cluster.post("/v1/completions", model="fixed", prompt="x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


async def test_request_without_workers_is_rejected_after_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(absence, "PATIENCE", 0.05)
    cluster = Workers(tmp_path)
    cluster.start("first")
    cluster.stop("first")
    for _ in range(2):
        answer = await cluster.post("/v1/completions", model="m", prompt="x")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert answer.headers["retry-after"]
