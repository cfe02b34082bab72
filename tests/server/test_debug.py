"""What /debug/cache shows, and to whom."""

from __future__ import annotations

import httpx
import pytest

from tests.mock_checkpoint import IMAGE_TOKENS
from tests.server.live import QUESTION, LiveServer, stream_lines
from tests.server.test_chat import about, data_url
from tests.server.test_metrics import IMAGES
from tests.waiting import wait_until
from vlmserve.server.debug import cache_report
from vlmserve.types import EngineSnapshot, EngineStats


@pytest.fixture(scope="module")
def debugged(folder):
    settings = {"mock_tpot": 0.02, "max_num_seqs": 1, "block_size": 16}
    with LiveServer(folder, engine=settings, server={"enable_debug": True}) as server:
        yield server


def look(server: LiveServer) -> httpx.Response:
    return httpx.get(f"{server.url}/debug/cache", timeout=60)


def test_by_default_there_is_no_such_path(live):
    answer = look(live)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    assert "/debug/cache" not in httpx.get(f"{live.url}/openapi.json", timeout=60).json()["paths"]


def test_it_shows_the_pools_and_every_unfinished_request(debugged):
    text = "a very secret question"
    body = {"messages": about(data_url("red"), text=text), "ignore_eos": True, "max_tokens": 200, "n": 2}
    with stream_lines(debugged.url, body) as lines:
        next(lines)
        wait_until(lambda: debugged.client.stats.generation_tokens > 2)
        answer = look(debugged)
        assert answer.status_code == 200
        shown = answer.json()
    assert text not in answer.text
    running, waiting = shown["requests"]
    assert (running["state"], waiting["state"]) == ("running", "waiting")
    assert running["request_id"] == waiting["request_id"].removesuffix("1") + "0"
    assert running["num_images"] == 1
    assert running["num_tokens"] > running["num_prompt_tokens"] > IMAGE_TOKENS
    assert running["num_computed_tokens"] == running["num_tokens"] - 1
    assert (waiting["num_computed_tokens"], waiting["num_blocks"]) == (0, 0)
    blocks = shown["kv_blocks"]
    assert blocks["used"] == running["num_blocks"] == -(-running["num_tokens"] // 16)
    assert blocks["total"] == blocks["used"] + blocks["free"]
    wait_until(lambda: look(debugged).json()["requests"] == [])
    assert look(debugged).json()["kv_blocks"]["used"] == 0


def test_every_pools_figures_are_its_own():
    stats = EngineStats(**{field: 1000 * i for i, field in enumerate(EngineStats.__struct_fields__, start=1)})
    report = cache_report(EngineSnapshot(stats, []), IMAGES)
    assert report["kv_blocks"] == {
        "total": stats.kv_blocks_total,
        "used": stats.kv_blocks_used,
        "free": stats.kv_blocks_total - stats.kv_blocks_used,
        "cached": stats.kv_blocks_cached,
        "evictions": stats.kv_evictions,
    }
    assert report["state_slots"] == {
        "total": stats.state_slots_total,
        "used": stats.state_slots_used,
        "checkpoints": stats.state_checkpoints,
        "evictions": stats.state_evictions,
    }
    assert report["host_states"] == {
        "total": stats.host_states_total,
        "used": stats.host_states_used,
        "offloaded": stats.states_offloaded,
        "loaded": stats.states_loaded,
    }
    assert report["host_blocks"] == {
        "total": stats.host_blocks_total,
        "used": stats.host_blocks_used,
        "free": stats.host_blocks_total - stats.host_blocks_used,
        "offloaded": stats.blocks_offloaded,
        "loaded": stats.blocks_loaded,
    }
    assert report["encoder_cache"] == {
        "capacity_bytes": stats.encoder_cache_bytes,
        "used_bytes": stats.encoder_cache_used_bytes,
        "pinned_images": stats.encoder_cache_pinned,
        "queries": stats.encoder_queries,
        "hits": stats.encoder_hits,
    }
    assert report["disk_cache"]["hits"] == stats.disk_hits
    assert report["disk_cache"]["limit_bytes"] == stats.disk_limit_bytes
    assert report["image_cache"] == {
        "capacity_bytes": IMAGES.capacity_bytes,
        "used_bytes": IMAGES.used_bytes,
        "images": IMAGES.num_images,
        "hits": IMAGES.hits,
        "misses": IMAGES.misses,
    }
    assert cache_report(EngineSnapshot(stats, []), None)["image_cache"] is None


def test_engine_in_a_long_step_is_an_error(folder, monkeypatch):
    monkeypatch.setattr("vlmserve.server.debug.PATIENCE", 0.1)
    with LiveServer(folder, engine={"mock_tpot": 30}, server={"enable_debug": True}) as server:
        with stream_lines(server.url, {"messages": QUESTION, "ignore_eos": True, "max_tokens": 3}):
            wait_until(lambda: server.client.stats.generation_tokens == 1)
            answer = look(server)
        assert answer.status_code == 503
        assert "busy with one step" in answer.json()["error"]["message"]


def test_without_a_living_engine_it_says_so(folder):
    with LiveServer(folder, server={"enable_debug": True}) as server:
        server.client.process.kill()
        wait_until(lambda: not server.client.alive)
        answer = look(server)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
