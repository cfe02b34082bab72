"""A gateway has workers load the models that requests name."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.scaleout.ondemand.hosting import Hosting
from tests.scaleout.ondemand.serving import SIZE, TOKEN, list_models, make_models
from tests.scaleout.processes import ForkedMember
from tests.waiting import until
from vlmserve.scaleout import absence
from vlmserve.scaleout.member_messages import HostLaunch, ModelLaunch, WorkerLaunch
from vlmserve.scaleout.messages import TOKEN_HEADER
from vlmserve.scaleout.ondemand import host
from vlmserve.scaleout.ondemand import pool as pools
from vlmserve.scaleout.settings import ModelsConfig
from vlmserve.server import streams
from vlmserve.settings.config import ServerConfig

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"), NAMES)


async def test_gateway_lists_models_that_workers_could_load(folder):
    async with Hosting(list_models(folder)) as cluster:
        assert await cluster.states() == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}
        assert (await cluster.client.get("/ready")).status_code == 200
        answer = await cluster.ask("b")
        assert (answer.status_code, answer.json()["model"]) == (200, "b")
        assert await cluster.states() == {"b": "loaded", "a": "unloaded", "c": "unloaded"}
        assert (await cluster.client.get("/v1/models/b")).json()["max_model_len"]
        page = (await cluster.client.get("/metrics")).text
        assert 'vlmserve:model_loads_total{worker="worker-0",model="b"}' in page
        assert 'vlmserve:gateway_worker_up{worker="worker-' in page


async def test_gateway_lists_all_names_of_unloaded_models(folder):
    [first, *_] = list_models(folder)
    named = replace(first, server=first.server.model_copy(update={"served_model_name": ("alias",)}))
    async with Hosting([named]) as cluster:
        assert await cluster.states() == {"a": "unloaded", "alias": "unloaded"}


async def test_gateway_changes_adapters_of_unloaded_models(folder):
    listed = list_models(folder, lora_modules=["poems=/adapters/poems", "odes=/adapters/odes"], enable_lora=True)
    async with Hosting(listed[:1]) as cluster:
        assert await cluster.states() == {"a": "unloaded", "odes": "unloaded", "poems": "unloaded"}
        assert (await cluster.client.get("/v1/models/poems")).json()["parent"] == "a"
        answer = await cluster.client.post("/v1/unload_lora_adapter", json={"lora_name": "poems", "model": "a"})
        assert answer.status_code == 200
        assert await cluster.states() == {"a": "unloaded", "odes": "unloaded"}


async def test_models_load_where_room_is(folder):
    async with Hosting(list_models(folder), rooms=(1, 2)) as cluster:
        for name in NAMES:
            assert (await cluster.ask(name)).status_code == 200
        first, second = cluster.loaded()
        assert first | second == {*NAMES}
        assert [len(first), len(second)] == [1, 2]
        for name in NAMES:
            assert (await cluster.ask(name)).status_code == 200
        assert cluster.loaded() == [first, second], "loaded models answer without another load"


async def test_least_recently_used_model_makes_room(folder):
    async with Hosting(list_models(folder)) as cluster:
        for name in ("a", "b", "a"):
            assert (await cluster.ask(name)).status_code == 200
        hosts = cluster.gateway.hosts
        await until(
            lambda: not hosts.models["b"].users and 0 < hosts.models["a"].idle_seconds < hosts.models["b"].idle_seconds
        )
        assert (await cluster.ask("c")).status_code == 200
        loaded = cluster.loaded()
        assert {"a"} in loaded
        assert {"c"} in loaded


async def test_concurrent_requests_load_a_model_once(folder):
    async with Hosting(list_models(folder)) as cluster:
        answers = await asyncio.gather(*(cluster.ask("a") for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        assert sum(len(worker.started) for worker in cluster.workers) == 1


async def test_waiting_stream_tells_the_state(folder, monkeypatch):
    monkeypatch.setattr(streams, "NEWS_SECONDS", 0.01)
    async with Hosting(list_models(folder)) as cluster:
        lines = (await cluster.ask("a", stream=True)).text.splitlines()
        told = [json.loads(line[2:]) for line in lines if line.startswith(": {")]
        assert told[0]["model"] == "a"
        assert {one["state"] for one in told} <= {"waiting", "loading"}
        assert lines[-2] == "data: [DONE]"


async def test_another_worker_loads_if_a_load_dies(folder):
    async with Hosting(list_models(folder), rooms=(2, 2)) as cluster:
        first = cluster.workers[0]
        first.kills_loads = True
        answers = await asyncio.gather(*(cluster.ask(name) for name in ("a", "a", "b")))
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert first.started
        assert cluster.loaded() == [set(), {"a", "b"}]


@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_another_worker_loads_if_a_worker_leaves(folder, is_forgotten):
    async with Hosting(list_models(folder)) as cluster:
        first, second = cluster.workers
        ticket = await first.host.pool.enter("b")
        full = await second.host.pool.enter("c")
        asking = asyncio.ensure_future(cluster.ask("a"))
        await until(lambda: first.host.pool.models["a"].waiting or second.host.pool.models["a"].waiting)
        leaving, other = (first, second) if first.host.pool.models["a"].waiting else (second, first)
        if is_forgotten:
            cluster.gateway.set_workers([other.url])
        else:
            await leaving.close()
        other.host.pool.leave(full if other is second else ticket)
        assert (await asking).status_code == 200
        assert other.host.pool.models["a"].state == "loaded"


@pytest.mark.parametrize("is_known", [False, True])
async def test_requests_wait_for_a_restarting_worker(folder, monkeypatch, is_known):
    monkeypatch.setattr(absence, "PATIENCE", 60.0)
    async with Hosting(list_models(folder), rooms=(1,)) as cluster:
        assert (await cluster.ask("a")).status_code == 200
        await cluster.workers[0].close()
        if is_known:
            await until(lambda: not any(member.is_heard for member in cluster.gateway.members.values()))
        else:
            cluster.gateway.set_workers([])
        asking = [asyncio.ensure_future(cluster.ask(name)) for name in ("a", "b")]
        await until(lambda: cluster.gateway.num_in_flight == 2)
        cluster.workers[0] = cluster.new_worker("worker-0", 1)
        cluster.gateway.set_workers([cluster.workers[0].url])
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200, 200]


async def test_model_that_makes_room_loads_elsewhere(folder):
    async with Hosting(list_models(folder), patience=0.0) as cluster:
        pool = cluster.workers[0].host.pool
        ticket = await pool.enter("a")
        waiting = asyncio.ensure_future(pool.enter("b"))
        await until(lambda: cluster.gateway.hosts.draining)
        assert (await cluster.ask("a")).status_code == 200
        assert cluster.loaded() == [{"a"}, {"a"}]
        pool.leave(ticket)
        pool.leave(await waiting)


async def test_models_also_run_on_workers_of_one(folder):
    listed = list_models(folder)
    one = listed[0]
    own = ServerConfig(port=0, served_model_name=one.name, storage_url="none", stats_interval=0)
    launch = WorkerLaunch(
        "alone", TOKEN, one.engine.model_dump_json(), one.media.model_dump_json(), own.model_dump_json()
    )
    process = ForkedMember(launch, patience=10.0, in_threads=True)
    async with Hosting(listed, rooms=(1,)) as cluster:
        url = await asyncio.to_thread(process.wait_until_up)
        cluster.gateway.set_workers([cluster.workers[0].url, url])
        await until(lambda: cluster.gateway.members_of("a"))
        assert await cluster.states() == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
        assert [(await cluster.ask(name)).json()["model"] for name in ("a", "b")] == ["a", "b"]
        assert cluster.loaded() == [{"b"}]
    process.close()


async def test_failed_load_tells_its_reason(tmp_path):
    broken = make_models(tmp_path, ["broken", "whole"])
    (broken / "broken" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    async with Hosting(list_models(broken)) as cluster:
        answer = await cluster.ask("broken")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "broken could not be loaded" in answer.text
        assert answer.headers["retry-after"]
        assert [len(worker.started) for worker in cluster.workers] == [1, 1], "each worker has tried"
        await until(lambda: cluster.gateway.hosts.models["broken"].state == "failed")
        card = (await cluster.client.get("/v1/models/broken")).json()
        assert (card["state"], "tokenizer" in card["reason"]) == ("failed", True)


async def test_crashed_model_loads_again(folder):
    async with Hosting(list_models(folder), rooms=(1,)) as cluster:
        assert (await cluster.ask("a")).status_code == 200
        os.kill(cluster.workers[0].started[0].pid, signal.SIGKILL)
        assert (await cluster.ask("a")).status_code == 200
        assert cluster.workers[0].host.pool.models["a"].crashes == 1


async def test_running_model_stays_loaded(folder):
    async with Hosting(list_models(folder, mock_tpot=0.05), rooms=(1,)) as cluster:
        assert (await cluster.ask("a", max_tokens=1)).status_code == 200
        running = asyncio.ensure_future(cluster.ask("a", max_tokens=40))
        await until(lambda: cluster.gateway.hosts.models["a"].users)
        waiting = asyncio.ensure_future(cluster.ask("b", max_tokens=1))
        assert (await running).json()["usage"]["completion_tokens"] == 40
        assert (await waiting).status_code == 200
        assert cluster.loaded() == [{"b"}]


async def test_unloading_waits_for_requests_without_a_report(folder, monkeypatch):
    monkeypatch.setattr(pools, "STOP_SECONDS", 0.05)
    async with Hosting(list_models(folder, mock_tpot=0.02), rooms=(1,)) as cluster:
        assert (await cluster.ask("a", max_tokens=1)).status_code == 200
        own = cluster.workers[0].host.pool
        await until(lambda: own.shelf.slots["a"].is_idle)
        monkeypatch.setattr(own, "report", lambda *_: None)
        body = {"model": "a", "prompt": "What is", "max_tokens": 50, "stream": True}
        async with cluster.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(line async for line in lines if line.startswith("data: "))
            waiting = asyncio.ensure_future(cluster.ask("b", max_tokens=1))
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert (await waiting).status_code == 200


async def test_busy_model_makes_room_after_patience(folder):
    async with Hosting(list_models(folder, mock_tpot=0.02), rooms=(1,), patience=0.2) as cluster:
        stop = asyncio.Event()
        codes = []

        async def keep_asking() -> None:
            while not stop.is_set():
                codes.append((await cluster.ask("a", max_tokens=20)).status_code)

        asking = [asyncio.ensure_future(keep_asking()) for _ in range(3)]
        await until(lambda: codes)
        assert (await cluster.ask("b")).status_code == 200
        stop.set()
        await asyncio.gather(*asking)
        assert {*codes} == {200}


async def test_unknown_model_gets_known_names(folder):
    async with Hosting(list_models(folder)) as cluster:
        answer = await cluster.ask("d")
        assert (answer.status_code, "only 'a', 'b', 'c'" in answer.text) == (404, True)
        assert (await cluster.ask(None)).status_code == 400
        answer = await cluster.client.get("/v1/files")
        assert (answer.status_code, "No model is loaded" in answer.text) == (503, True)


async def test_only_model_needs_no_name(folder):
    async with Hosting(list_models(folder)[:1]) as cluster:
        assert (await cluster.ask(None)).json()["model"] == "a"


async def test_waiting_ends_with_the_client(folder):
    async with Hosting(list_models(folder), rooms=(1,)) as cluster:
        pool = cluster.workers[0].host.pool
        ticket = await pool.enter("a")
        asking = asyncio.ensure_future(cluster.ask("b"))
        await until(lambda: pool.models["b"].waiting)
        asking.cancel()
        await until(lambda: not pool.models["b"].waiting)
        pool.leave(ticket)
        assert cluster.loaded() == [{"a"}]


async def test_model_over_the_budget_is_rejected(folder):
    async with Hosting(list_models(folder, kv_cache_memory=4 * SIZE)) as cluster:
        answer = await cluster.ask("a")
        assert (answer.status_code, "--models-memory" in answer.text) == (503, True)


async def test_workers_load_for_gateways_alone(folder):
    async with Hosting(list_models(folder)) as cluster, httpx.AsyncClient() as client:
        answer = await client.post(f"{cluster.workers[0].url}/cluster/models", json={"model": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_a_gateway")
        assert (await client.get(f"{cluster.workers[0].url}/health")).status_code == 200
        assert not cluster.workers[0].started


async def test_held_models_send_pings(folder, monkeypatch):
    monkeypatch.setattr(host, "PING_SECONDS", 0.01)
    async with Hosting(list_models(folder)) as cluster, httpx.AsyncClient(timeout=60) as client:
        url, headers = f"{cluster.workers[0].url}/cluster/models", {TOKEN_HEADER: TOKEN}
        async with client.stream("POST", url, json={"model": "a"}, headers=headers) as answer:
            assert (await anext(answer.aiter_bytes())).startswith(b": ping\n\n")
            assert cluster.workers[0].shelf.slots["a"].users == 1
        await until(lambda: not cluster.workers[0].shelf.slots["a"].users)


async def test_worker_process_drains_on_sigterm(folder):
    listed = [
        ModelLaunch(one.name, one.engine.model_dump_json(), one.media.model_dump_json(), one.server.model_dump_json())
        for one in list_models(folder, mock_tpot=0.02)
    ]
    own, models = ServerConfig(port=0), ModelsConfig(models_memory=2**34)
    launch = HostLaunch("worker", TOKEN, listed, own.model_dump_json(), models.model_dump_json())
    process = ForkedMember(launch, patience=10.0, in_threads=False)
    async with Hosting([], rooms=()) as cluster:
        cluster.gateway.set_workers([await asyncio.to_thread(process.wait_until_up)])
        await until(lambda: cluster.gateway.hosts.models)
        body = {"model": "a", "prompt": "What is", "max_tokens": 50, "stream": True}
        async with cluster.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(line async for line in lines if line.startswith("data: "))
            process.terminate()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert await asyncio.to_thread(process.wait, 60) == 0
    process.close()


async def test_random_requests_never_fail(folder):
    dice = random.Random(0)
    async with Hosting(list_models(folder)) as cluster:
        plan = iter([dice.choice(NAMES) for _ in range(40)])
        answers = []

        async def ask_all() -> None:
            for name in plan:
                answers.append((name, await cluster.ask(name, temperature=0)))
                assert all(worker.shelf.used <= worker.shelf.budget for worker in cluster.workers)

        await asyncio.gather(*(ask_all() for _ in range(6)))
        assert len(answers) == 40
        assert [one.text for name, one in answers if one.status_code != 200 or one.json()["model"] != name] == []
