"""Several models behind one address, with processes that start and end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scaleout.ondemand.serving import SIZE, Serving, list_models, make_models
from tests.waiting import until
from vlmserve.scaleout.ondemand import pool
from vlmserve.scaleout.ondemand.catalogue import Expected, Listed, expect
from vlmserve.server import streams
from vlmserve.server.keys import add_key

NAMES = ("a", "b", "c")
MESSAGES = [{"role": "user", "content": "What is"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"), NAMES)


async def test_request_loads_its_model(folder):
    async with Serving(list_models(folder)) as serving:
        assert await serving.states() == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}
        answer = await serving.ask("b")
        assert (answer.status_code, answer.json()["model"]) == (200, "b")
        assert await serving.states() == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
        assert (await serving.client.get("/v1/models/b")).json()["max_model_len"]


async def test_third_model_replaces_the_least_recent(folder):
    async with Serving(list_models(folder)) as serving:
        for name in ("a", "b", "a", "c"):
            assert (await serving.ask(name)).status_code == 200
        assert await serving.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        page = (await serving.client.get("/metrics")).text
        assert 'vlmserve:model_loads_total{model="b"} 1.0' in page
        assert '{worker="a",model_name="a"}' in page


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/embeddings"])
async def test_unknown_model_gets_known_names(folder, path):
    async with Serving(list_models(folder)) as serving:
        answer = await serving.ask("d", path, messages=MESSAGES, max_tokens=1)
        assert answer.status_code == 404
        assert "only 'a', 'b', 'c'" in answer.text
        assert not serving.started


async def test_unnamed_model_is_rejected(folder):
    async with Serving(list_models(folder)) as serving:
        answer = await serving.ask(None)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


async def test_only_model_needs_no_name(folder):
    async with Serving(list_models(folder)[:1]) as serving:
        assert (await serving.ask(None)).json()["model"] == "a"


async def test_every_api_loads_models(folder):
    async with Serving(list_models(folder), room=3) as serving:
        chat = await serving.ask("a", "/v1/messages", messages=MESSAGES, max_tokens=2)
        assert chat.json()["type"] == "message"
        answer = await serving.ask("b", "/v1/responses", input="What is", max_output_tokens=2)
        assert answer.json()["object"] == "response"
        lines = (await serving.ask("c:latest", "/api/chat", messages=MESSAGES)).text.splitlines()
        assert json.loads(lines[-1])["done"]
        loaded = (await serving.client.get("/api/ps")).json()["models"]
        assert {one["name"] for one in loaded} == {f"{name}:latest" for name in NAMES}


async def test_waiting_stream_tells_the_state(folder, monkeypatch):
    monkeypatch.setattr(streams, "NEWS_SECONDS", 0.01)
    async with Serving(list_models(folder)) as serving:
        lines = (await serving.ask("a", stream=True)).text.splitlines()
        told = [json.loads(line[2:]) for line in lines if line.startswith(": {")]
        assert told[0]["model"] == "a"
        assert {one["state"] for one in told} <= {"waiting", "loading"}
        assert lines[-2] == "data: [DONE]"


async def test_failed_load_tells_its_reason(folder, tmp_path):
    broken = make_models(tmp_path, ["broken", "whole"])
    tokenizer = (broken / "broken" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    async with Serving(list_models(broken)) as serving:
        answers = await asyncio.gather(serving.ask("broken"), serving.ask("broken"), serving.ask("whole"))
        assert [answer.status_code for answer in answers] == [503, 503, 200]
        assert "broken could not be loaded" in answers[0].text
        assert (await serving.ask("broken")).headers["retry-after"]
        assert len(serving.started) == 2, "it is not tried again at once"
        card = (await serving.client.get("/v1/models/broken")).json()
        assert (card["state"], "tokenizer" in card["reason"]) == ("failed", True)
        tokenizer.rename(broken / "broken" / "tokenizer.json")
        await until(lambda: serving.model("broken").retry_at < time.monotonic())
        assert (await serving.ask("broken")).status_code == 200
        assert "reason" not in (await serving.client.get("/v1/models/broken")).json()


async def test_model_over_the_budget_is_rejected(folder):
    async with Serving(list_models(folder, kv_cache_memory=4 * SIZE)) as serving:
        answer = await serving.ask("a")
        assert (answer.status_code, "--models-memory" in answer.text) == (503, True)
        assert not serving.started


async def test_crashed_model_loads_again(folder):
    async with Serving(list_models(folder)) as serving:
        assert (await serving.ask("a")).status_code == 200
        os.kill(serving.started[0].pid, signal.SIGKILL)
        assert (await serving.ask("a")).status_code == 200
        assert serving.model("a").crashes == 1


async def test_dead_idle_model_is_unloaded(folder):
    async with Serving(list_models(folder)) as serving:
        assert (await serving.ask("a")).status_code == 200
        os.kill(serving.model("a").pids[-1], signal.SIGKILL)
        await until(lambda: serving.model("a").crashes)
        assert await serving.states() == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}
        assert (await serving.ask("a")).status_code == 200


@pytest.mark.parametrize("delay", [0.0, 1.0])
async def test_stuck_load_ends(folder, delay):
    class Stuck(Serving):
        def start(self, launch):
            process = super().start(launch)
            os.kill(process.pid, signal.SIGSTOP)
            threading.Event().wait(delay)
            return process

    async with Stuck(list_models(folder), load_timeout=0.5) as serving:
        answer = await serving.ask("a")
        assert (answer.status_code, "--models-load-timeout" in answer.text) == (503, True)
        assert (await serving.states())["a"] == "failed"


async def test_request_survives_a_crash(folder):
    async with Serving(list_models(folder, mock_tpot=0.05)) as serving:
        asking = asyncio.ensure_future(serving.ask("a", max_tokens=40))
        await until(lambda: serving.model("a").slot and serving.model("a").slot.users)
        os.kill(serving.started[0].pid, signal.SIGKILL)
        assert (await asking).status_code == 200
        assert len(serving.started) == 2


async def test_own_name_beats_names_of_loaded_models(folder):
    first, second, _ = list_models(folder)
    namesake = replace(first, name=second.engine.model)
    async with Serving([second, namesake]) as serving:
        assert (await serving.ask(second.name)).json()["model"] == second.name
        assert (await serving.ask(namesake.name)).json()["model"] == namesake.name


async def test_unloaded_model_lacks_no_adapters(folder):
    async with Serving(list_models(folder)) as serving:
        assert not serving.gateway.lacking("a")


async def test_lists_have_all_names_of_unloaded_models(folder):
    [first, *_] = list_models(folder, lora_modules=["poems=/adapters/poems"], enable_lora=True)
    named = replace(first, server=first.server.model_copy(update={"served_model_name": ("alias",)}))
    async with Serving([named]) as serving:
        assert await serving.states() == {"a": "unloaded", "alias": "unloaded", "poems": "unloaded"}
        assert (await serving.client.get("/v1/models/poems")).json()["parent"] == "a"


async def test_unloading_an_adapter_loads_no_model(folder):
    listed = list_models(folder, lora_modules=["poems=/adapters/poems", "odes=/adapters/odes"], enable_lora=True)
    async with Serving(listed[:1]) as serving:
        for status in (200, 404):
            answer = await serving.client.post("/v1/unload_lora_adapter", json={"lora_name": "poems", "model": "a"})
            assert answer.status_code == status
        assert await serving.states() == {"a": "unloaded", "odes": "unloaded"}


async def test_lists_lack_unloaded_adapters(folder):
    [first, *_] = list_models(folder)
    async with Serving([first]) as serving:
        assert (await serving.ask("a")).status_code == 200
        engine = first.engine.model_copy(update={"lora_modules": ("poems=/adapters/poems",)})
        serving.model("a").listed = replace(first, engine=engine)
        assert await serving.states() == {"a": "loaded"}


async def test_adapter_loads_its_model_first(folder):
    async with Serving(list_models(folder)) as serving:
        wanted = {"lora_name": "poems", "lora_path": "poems", "model": "b"}
        answer = await serving.client.post("/v1/load_lora_adapter", json=wanted)
        assert answer.status_code == 400, "the mock engine has no adapters"
        assert await serving.states() == {"a": "unloaded", "b": "loaded", "c": "unloaded"}


async def test_tokens_count_although_the_model_unloads(folder, tmp_path):
    keys = tmp_path / "keys.jsonl"
    key = add_key(keys, "alice", tokens_per_minute=1000)
    async with Serving(list_models(folder), room=1, api_keys_file=str(keys)) as serving:
        serving.client.headers["x-api-key"] = key
        answers = await asyncio.gather(*(serving.ask(name) for name in "abcabc"))
        total = sum(answer.json()["usage"]["total_tokens"] for answer in answers)
        assert serving.gateway.keys is not None
        account = serving.gateway.keys.find(key)
        assert account is not None
        await until(lambda: account.buckets["tokens"].taken == total)


async def test_loads_do_not_wait_for_downloads(folder, monkeypatch):
    arrived = threading.Event()

    def expect_slowly(listed: Listed) -> Expected:
        if listed.name == "b":
            arrived.wait(60)
        return expect(listed)

    monkeypatch.setattr(pool, "expect", expect_slowly)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with Serving(list_models(folder)) as serving:
        asking = asyncio.ensure_future(serving.ask("b"))
        await until(lambda: serving.model("b").estimating is not None)
        assert (await serving.ask("a")).status_code == 200
        arrived.set()
        assert (await asking).status_code == 200


async def test_close_fails_requests_that_wait_for_downloads(folder, monkeypatch):
    arrived = threading.Event()
    monkeypatch.setattr(pool, "expect", lambda listed: arrived.wait(60))
    async with Serving(list_models(folder)) as serving:
        asking = asyncio.ensure_future(serving.ask("a"))
        await until(lambda: serving.model("a").estimating is not None)
        await serving.pool.close()
        assert (await asking).status_code == 503
        arrived.set()


async def test_waiting_ends_with_the_client(folder):
    async with Serving(list_models(folder), room=1) as serving:
        assert (await serving.ask("a")).status_code == 200
        ticket = await serving.pool.enter("a")
        asking = asyncio.ensure_future(serving.ask("b"))
        await until(lambda: serving.model("b").waiting)
        assert (await serving.ask("a")).status_code == 200, "it does not wait for the other model"
        asking.cancel()
        await until(lambda: not serving.model("b").waiting)
        serving.pool.leave(ticket)
        assert (await serving.states())["a"] == "loaded", "nobody needs its memory any more"


async def test_random_requests_never_fail(folder):
    """Four times as many requests in flight as models in memory."""
    dice = random.Random(0)
    async with Serving(list_models(folder)) as serving:
        plan = iter([dice.choice(NAMES) for _ in range(60)])
        answers = []

        async def ask_all() -> None:
            for name in plan:
                answers.append((name, await serving.ask(name, temperature=0)))
                assert serving.shelf.used <= serving.shelf.budget

        await asyncio.gather(*(ask_all() for _ in range(8)))
        assert len(answers) == 60
        assert all((one.status_code, one.json()["model"]) == (200, name) for name, one in answers)


async def test_close_ends_all_processes(folder):
    async with Serving(list_models(folder)) as serving:
        await asyncio.gather(serving.ask("a"), serving.ask("b"))
        waiting = asyncio.ensure_future(serving.ask("c"))
        await until(lambda: len(serving.started) > 2 or serving.model("c").waiting)
    assert not any(process.is_alive for process in serving.started)
    await asyncio.gather(waiting, return_exceptions=True)
