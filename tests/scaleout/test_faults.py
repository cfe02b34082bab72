"""Workers that die, drain, and come back, under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.scaleout.processes import Cluster
from vlmserve.scaleout.fleet import TAG_LENGTH, tag_of

SLOW = {"mock_ttft": 0.3, "mock_tpot": 0.02}
TOKENS = 60


@dataclass
class Stream:
    """What came of a request."""

    text: str = ""
    status: int = 0
    error: str | None = None
    is_done: bool = False
    chunks: int = 0
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
                    stream.chunks += 1
                    if "error" in event:
                        stream.error = event["error"]["code"]
                    else:
                        stream.text += event["choices"][0]["delta"].get("content") or ""
    except httpx.HTTPError as error:
        stream.failure = repr(error)


async def reference(url: str, count: int) -> list[str]:
    """The answers that an undisturbed cluster gives."""
    streams = [Stream() for _ in range(count)]
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=count)) as client:
        await asyncio.gather(*(ask(client, url, number, stream) for number, stream in enumerate(streams)))
    assert all(stream.is_done for stream in streams)
    return [stream.text for stream in streams]


@pytest.mark.parametrize("begun", [False, True])
async def test_a_killed_worker_takes_only_what_it_had_begun(folder, begun):
    """50 streams over 4 workers, one of which gets SIGKILL: before it has answered anything, and in the middle."""
    with Cluster(folder, 4, engine=SLOW if begun else {**SLOW, "mock_ttft": 2.0}) as cluster:
        expected = await reference(cluster.url, 50)
        streams = [Stream() for _ in range(50)]
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=50)) as client:
            tasks = [asyncio.ensure_future(ask(client, cluster.url, n, s)) for n, s in enumerate(streams)]
            await asyncio.sleep(0.5)
            while begun and not all(stream.chunks for stream in streams):
                await asyncio.sleep(0.05)
            assert all(bool(stream.chunks) == begun for stream in streams)
            os.kill(cluster.workers["worker-0"][0].pid, signal.SIGKILL)
            await asyncio.gather(*tasks)
        assert not [stream.failure for stream in streams if stream.failure]
        assert {stream.status for stream in streams} == {200}
        lost = [stream for stream in streams if not stream.is_done]
        whole = [(stream.text, text) for stream, text in zip(streams, expected, strict=True) if stream.is_done]
        assert all(text == wanted for text, wanted in whole)
        if begun:
            assert 5 <= len(lost) <= 25
            assert {stream.error for stream in lost} == {"unavailable"}
        else:
            assert not lost
        # What comes next goes to the others, without a try at the dead one for each.
        assert len(cluster.up()) == 3
        assert await reference(cluster.url, 20) == expected[:20]


async def test_a_rolling_restart_loses_nothing(folder):
    """Each of two workers is replaced by another one while requests come all the time."""
    with Cluster(folder, 2, engine={"mock_ttft": 0.05, "mock_tpot": 0.005}) as cluster:
        streams: list[Stream] = []
        stopped = asyncio.Event()

        async def keep_asking(client: httpx.AsyncClient) -> None:
            while not stopped.is_set():
                streams.append(Stream())
                await ask(client, cluster.url, len(streams) % 7, streams[-1])

        def replace(name: str) -> None:
            old, _ = cluster.workers[name]
            cluster.add(f"{name}-new")
            cluster.wait_for(3)
            old.terminate()
            assert old.wait(30) == 0
            del cluster.workers[name]
            cluster.tell()

        async with httpx.AsyncClient(timeout=60) as client:
            tasks = [asyncio.ensure_future(keep_asking(client)) for _ in range(8)]
            for name in ("worker-0", "worker-1"):
                await asyncio.to_thread(replace, name)
                await asyncio.sleep(0.3)
            stopped.set()
            await asyncio.gather(*tasks)
        assert len(streams) > 50
        assert {(stream.status, stream.error, stream.is_done, stream.failure) for stream in streams} == {
            (200, None, True, "")
        }
        assert sorted(cluster.up()) == ["worker-0-new", "worker-1-new"]


async def test_a_restarted_engine_is_another_epoch(folder):
    """The engine's process dies, not the worker's: nothing is believed to be cached, and requests are answered."""
    with Cluster(folder, 1, server={"restart_backoff": 0}) as cluster:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        assert httpx.post(f"{cluster.url}/v1/chat/completions", json=body).status_code == 200
        worker = cluster.workers["worker-0"][0].pid
        children = [int(pid) for pid in Path(f"/proc/{worker}/task/{worker}/children").read_text().split()]
        os.kill(children[0], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while httpx.post(f"{cluster.url}/v1/chat/completions", json=body).status_code != 200:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        cluster.wait_for(1)


def test_a_full_worker_refuses_with_a_time_to_wait(folder):
    engine = {"mock_ttft": 3.0, "max_num_seqs": 1, "max_waiting": 1}

    async def crowd(url: str) -> list[httpx.Response]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(client.post(f"{url}/v1/chat/completions", json=body) for _ in range(8)))

    with Cluster(folder, 2, engine=engine) as cluster:
        answers = asyncio.run(crowd(cluster.url))
        statuses = [answer.status_code for answer in answers]
        assert statuses.count(200) == 4
        assert statuses.count(429) == 4
        assert all(answer.headers["retry-after"] for answer in answers if answer.status_code == 429)
        assert len(cluster.up()) == 2


async def test_a_response_whose_worker_dies_has_failed_and_is_stored_so(folder, tmp_path):
    history = {"storage_url": None, "storage_path": str(tmp_path / "history.db")}
    with Cluster(folder, 2, engine=SLOW, server=history) as cluster:
        body = {"model": "tiny", "input": "x", "stream": True, "max_output_tokens": TOKENS}
        workers = {tag_of(name): process for name, (process, _) in cluster.workers.items()}
        events = []
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", f"{cluster.url}/v1/responses", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))
                    if len(events) == 6:
                        id = events[0]["response"]["id"]
                        os.kill(workers[id.removeprefix("resp_")[:TAG_LENGTH]].pid, signal.SIGKILL)
        last = events[-1]["response"]
        assert (events[-1]["type"], last["id"], last["status"]) == ("response.failed", id, "failed")
        deadline = time.monotonic() + 60  # it is stored before the event, unless that takes long
        while (kept := httpx.get(f"{cluster.url}/v1/responses/{id}")).status_code != 200:
            assert time.monotonic() < deadline, kept.text
            await asyncio.sleep(0.1)
        assert kept.json() == last
        [item] = httpx.get(f"{cluster.url}/v1/responses/{id}/input_items").json()["data"]
        assert item["content"][0]["text"] == "x"
