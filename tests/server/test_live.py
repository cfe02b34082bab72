"""What /live shows, and to whom."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import pytest

from tests.server.live import QUESTION, LiveServer, stream_lines
from tests.waiting import wait_until
from vlmserve.errors import EngineDeadError
from vlmserve.server.live import LiveView
from vlmserve.server.service import Service
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig
from vlmserve.types import BlockMap, EngineStats

BLOCKS = BlockMap(4, 1, [1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0])


def look(server: LiveServer) -> dict:
    response = httpx.get(f"{server.url}/live", timeout=60)
    assert response.status_code == 200
    return response.json()


def test_it_shows_requests_blocks_and_latencies(slow):
    body = {"messages": QUESTION, "ignore_eos": True, "max_tokens": 400}
    with stream_lines(slow.url, body) as lines:
        next(lines)
        wait_until(lambda: slow.client.stats.generation_tokens > 2)
        shown = look(slow)
    assert (shown["status"], shown["model"]) == ("serving", "tiny")
    assert shown["engine"]["num_running"] == 1
    assert sum(shown["blocks"]["held"]) > 0
    assert shown["latencies"]["ttft"]["60"]["count"] >= 1
    before = shown["latencies"]["e2e"]["300"]["count"]
    slow.ask(max_tokens=3, ignore_eos=True)
    latencies = look(slow)["latencies"]
    assert latencies["e2e"]["300"]["count"] == before + 1
    assert latencies["tpot"]["60"]["p50"] > 0


def test_of_what_is_asked_it_shows_nothing(live):
    live.ask(messages=[{"role": "user", "content": "a very secret question"}])
    assert "secret" not in httpx.get(f"{live.url}/live", timeout=60).text


@pytest.mark.parametrize(("protected", "status"), [(False, 200), (True, 401)])
def test_it_is_protected_as_metrics_are(folder, protected, status):
    with LiveServer(folder, server={"api_key": ("secret",), "protect_metrics": protected}) as server:
        for path in ("/live", "/metrics"):
            assert httpx.get(server.url + path, timeout=60).status_code == status
            assert httpx.get(server.url + path, headers={"x-api-key": "secret"}, timeout=60).status_code == 200


async def test_loading_server_has_no_engine_figures():
    service = Service(EngineConfig(), MediaConfig(), ServerConfig())
    stats = await LiveView(service).stats()
    assert (stats.status, stats.engine, stats.blocks, stats.image_cache) == ("loading", None, None, None)
    service.close()


class Engine:
    """A client whose engine can be busy, or gone."""

    def __init__(self) -> None:
        self.alive, self.num_unfinished, self.stats, self.death = True, 0, EngineStats(), "it was killed"
        self.calls, self.asked = self, 0
        self.answer: asyncio.Future[BlockMap] = asyncio.get_running_loop().create_future()

    async def map_blocks(self) -> BlockMap:
        self.asked += 1
        return await asyncio.shield(self.answer)


@pytest.fixture
async def watched():
    service = Service(EngineConfig(), MediaConfig(), ServerConfig())
    engine = Engine()
    service.open(engine, SimpleNamespace(media=SimpleNamespace(image_cache=SimpleNamespace(stats=lambda: None))))
    yield LiveView(service), engine
    service.close()


async def test_many_who_look_ask_the_engine_once(watched):
    view, engine = watched
    engine.answer.set_result(BLOCKS)
    shown = await asyncio.gather(*(view.stats() for _ in range(50)))
    assert engine.asked == 1
    assert all(stats.blocks == BLOCKS for stats in shown)


async def test_a_busy_engine_keeps_nobody_waiting(watched, monkeypatch):
    monkeypatch.setattr("vlmserve.server.live.PATIENCE", 0.01)
    monkeypatch.setattr("vlmserve.server.live.MAP_AGE", 0.0)
    view, engine = watched
    assert (await view.stats()).blocks is None
    assert (await view.stats()).blocks is None
    assert engine.asked == 1
    engine.answer.set_result(BLOCKS)
    assert (await view.stats()).blocks == BLOCKS


async def test_an_engine_that_dies_takes_its_figures_along(watched):
    view, engine = watched
    engine.answer.set_exception(EngineDeadError("it was killed"))
    assert (await view.stats()).blocks is None
    engine.alive = False
    stats = await view.stats()
    assert (stats.status, stats.engine, stats.blocks) == ("dead", None, None)
