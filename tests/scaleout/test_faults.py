"""Workers that die, drain, and come back, under load."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import pytest

from tests.scaleout.processes import Cluster
from tests.server.process import engines_of
from tests.waiting import until
from vlmserve.scaleout.fleet import TAG_LENGTH, tag_of

SLOW = {"mock_ttft": 0.3, "mock_tpot": 0.02}
TOKENS = 60
STREAMS = 24


class Fleet(Cluster):
    """A cluster to which workers are added in the places of those that a test has killed."""

    answers: Sequence[str] = ()
    """See `expected`."""

    def need(self, count: int) -> None:
        """Have so many workers that answer, at least."""
        self.workers = {name: one for name, one in self.workers.items() if one[0].is_alive}
        started = {name: self.start_worker(name) for name in self._new_names(count - len(self.workers))}
        for name, process in started.items():
            self.workers[name] = process, process.wait_until_up()
        self.tell()
        self.wait_for(len(self.workers))

    def _new_names(self, count: int) -> list[str]:
        return [f"worker-{next(self._numbers)}" for _ in range(count)]

    _numbers = itertools.count(100)


@pytest.fixture(scope="module")
def shared(folder, tmp_path_factory):
    history = {"storage_url": None, "storage_path": str(tmp_path_factory.mktemp("history") / "history.db")}
    with Fleet(
        folder, 4, engine=SLOW, server={"restart_backoff": 0, **history}, front={"body_memory": 100_000}
    ) as running:
        yield running


@dataclass
class Stream:
    """What came of a request."""

    text: str = ""
    status: int = 0
    error: str | None = None
    is_done: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """It has had a chunk."""
    failure: str = ""


async def ask(client: httpx.AsyncClient, url: str, number: int, stream: Stream) -> None:
    body = {
        "model": "tiny", "stream": True, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True,
        "messages": [{"role": "user", "content": f"question {number}"}],
    }  # fmt: skip
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            stream.status = answer.status_code
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    stream.is_done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    stream.begun.set()
                    if "error" in event:
                        stream.error = event["error"]["code"]
                    else:
                        stream.text += event["choices"][0]["delta"].get("content") or ""
    except httpx.HTTPError as error:
        stream.failure = repr(error)


async def answers(url: str, count: int) -> list[str]:
    """The answers that an undisturbed cluster gives."""
    streams = [Stream() for _ in range(count)]
    async with httpx.AsyncClient(timeout=60) as client:
        await asyncio.gather(*(ask(client, url, number, stream) for number, stream in enumerate(streams)))
    assert all(stream.is_done for stream in streams)
    return [stream.text for stream in streams]


async def expected(fleet: Fleet) -> Sequence[str]:
    """The answers to all `STREAMS` questions. They do not depend on which workers there are."""
    if not fleet.answers:
        fleet.answers = await answers(fleet.url, STREAMS)
    return fleet.answers


async def test_killed_worker_loses_no_waiting_request(shared):
    """Streams over 4 workers, one of which stands still when they come, and is killed then."""
    shared.need(4)
    name = next(iter(shared.workers))
    before = shared.requests(name)
    os.kill(shared.workers[name][0].pid, signal.SIGSTOP)
    streams = [Stream() for _ in range(STREAMS)]
    async with httpx.AsyncClient(timeout=60) as client:
        tasks = [asyncio.ensure_future(ask(client, shared.url, n, s)) for n, s in enumerate(streams)]
        await until(lambda: asyncio.to_thread(lambda: shared.requests(name) > before))
        os.kill(shared.workers[name][0].pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
    assert {(stream.status, stream.is_done, stream.error, stream.failure) for stream in streams} == {
        (200, True, None, "")
    }
    assert [stream.text for stream in streams] == await expected(shared)
    assert len(shared.up()) == 3


async def test_killed_worker_loses_only_started_requests(shared):
    """One worker gets SIGKILL in the middle of streams."""
    shared.need(3)
    name, *others = shared.workers
    undisturbed = await expected(shared)
    streams = [Stream() for _ in range(STREAMS)]
    async with httpx.AsyncClient(timeout=60) as client:
        tasks = [asyncio.ensure_future(ask(client, shared.url, n, s)) for n, s in enumerate(streams)]
        # At once: on a busy machine, the first ones end soon after the last ones begin.
        begun = asyncio.as_completed([stream.begun.wait() for stream in streams], timeout=60)
        for one in itertools.islice(begun, 4 * STREAMS // 5):
            await one
        assert not all(task.done() for task in tasks)
        os.kill(shared.workers[name][0].pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
    assert not [stream.failure for stream in streams if stream.failure]
    assert {stream.status for stream in streams} == {200}
    lost = [stream for stream in streams if not stream.is_done]
    whole = [(stream.text, text) for stream, text in zip(streams, undisturbed, strict=True) if stream.is_done]
    assert all(text == wanted for text, wanted in whole)
    assert 2 <= len(lost) <= 17
    assert {stream.error for stream in lost} == {"unavailable"}
    # What comes next goes to the others, without a try at the dead one for each.
    assert sorted(shared.up()) == sorted(others)
    assert await answers(shared.url, 8) == list(undisturbed[:8])


async def test_a_rolling_restart_loses_nothing(shared):
    """Each of two workers is replaced by another one while requests come all the time."""
    shared.need(2)
    replaced = dict(list(shared.workers.items())[:2])
    count = len(shared.workers)
    streams: list[Stream] = []
    stopped = asyncio.Event()

    async def keep_asking(client: httpx.AsyncClient) -> None:
        while not stopped.is_set():
            streams.append(Stream())
            await ask(client, shared.url, len(streams) % 7, streams[-1])

    def replace(name: str) -> None:
        old, _ = shared.workers[name]
        shared.add(f"{name}-new")
        shared.wait_for(count + 1)
        old.terminate()
        assert old.wait(60) == 0
        del shared.workers[name]
        shared.tell()
        shared.wait_for(count)

    async with httpx.AsyncClient(timeout=60) as client:
        tasks = [asyncio.ensure_future(keep_asking(client)) for _ in range(8)]
        for name in replaced:
            await asyncio.to_thread(replace, name)
            before = len(streams)
            await until(lambda before=before: len(streams) > before + 8)
        stopped.set()
        await asyncio.gather(*tasks)
    assert {(stream.status, stream.error, stream.is_done, stream.failure) for stream in streams} == {
        (200, None, True, "")
    }
    assert {f"{name}-new" for name in replaced} <= set(shared.up())


async def test_response_of_a_dead_worker_is_stored_failed(shared):
    shared.need(2)
    body = {"model": "tiny", "input": "x", "stream": True, "max_output_tokens": TOKENS}
    workers = {tag_of(name): process for name, (process, _) in shared.workers.items()}
    events = []
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{shared.url}/v1/responses", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 6:
                    id = events[0]["response"]["id"]
                    os.kill(workers[id.removeprefix("resp_")[:TAG_LENGTH]].pid, signal.SIGKILL)
    last = events[-1]["response"]
    assert (events[-1]["type"], last["id"], last["status"]) == ("response.failed", id, "failed")
    # It is stored before the event, unless that takes long.
    await until(lambda: asyncio.to_thread(lambda: httpx.get(f"{shared.url}/v1/responses/{id}").is_success))
    assert httpx.get(f"{shared.url}/v1/responses/{id}").json() == last
    [item] = httpx.get(f"{shared.url}/v1/responses/{id}/input_items").json()["data"]
    assert item["content"][0]["text"] == "x"


async def test_stream_takes_no_memory_from_other_requests(shared):
    shared.need(1)
    padding, headers = b" " * 60_000, {"content-type": "application/json"}
    first = json.dumps({"model": "tiny", "input": "x", "stream": True, "max_output_tokens": TOKENS}).encode()
    second = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
    async with (
        httpx.AsyncClient(base_url=shared.url, headers=headers, timeout=60) as client,
        client.stream("POST", "/v1/responses", content=first + padding) as answer,
    ):
        assert answer.status_code == 200
        assert (await client.post("/v1/completions", content=second + padding)).status_code == 200
        assert "response.completed" in [line.removeprefix("event: ") async for line in answer.aiter_lines()]


async def test_a_restarted_engine_is_another_epoch(folder):
    """The engine's process dies, not the worker's: nothing is believed to be cached, and requests are answered."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    with Cluster(folder, 1, server={"restart_backoff": 0}, in_threads=False) as cluster:
        assert httpx.post(f"{cluster.url}/v1/chat/completions", json=body).status_code == 200
        [(process, _)] = cluster.workers.values()
        [engine] = engines_of(process.pid)
        engine.kill()
        await until(
            lambda: asyncio.to_thread(lambda: httpx.post(f"{cluster.url}/v1/chat/completions", json=body).is_success)
        )
        await asyncio.to_thread(cluster.wait_for, 1)


def test_full_worker_rejects_with_a_retry_time(folder):
    engine = {"mock_ttft": 3.0, "max_num_seqs": 1, "max_waiting": 1}

    async def crowd(url: str) -> list[httpx.Response]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(client.post(f"{url}/v1/chat/completions", json=body) for _ in range(8)))

    with Cluster(folder, 2, engine=engine) as cluster:
        answers = asyncio.run(crowd(cluster.url))
        statuses = [answer.status_code for answer in answers]
        # Each has room for two, and for one until it has begun with that.
        assert 2 <= statuses.count(200) <= 4
        assert statuses.count(429) == 8 - statuses.count(200)
        assert all(answer.headers["retry-after"] for answer in answers if answer.status_code == 429)
        assert len(cluster.up()) == 2
