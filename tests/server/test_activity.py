"""The line in the log while the server is busy."""

from __future__ import annotations

import asyncio
import logging

import pytest

from vlmserve.server.activity import activity_line, activity_log
from vlmserve.types import EngineStats

IDLE = EngineStats(kv_blocks_total=200, steps=7)


def test_everything_that_happened_is_in_it():
    before = EngineStats(
        num_running=1,
        kv_blocks_total=200,
        prompt_tokens=100,
        generation_tokens=50,
        prefix_queried_tokens=100,
        prefix_cached_tokens=100,
        encoder_queries=5,
        encoder_hits=5,
        preemptions=3,
        blocks_offloaded=10,
        steps=7,
    )
    after = EngineStats(
        num_running=12,
        num_waiting=3,
        kv_blocks_total=200,
        kv_blocks_used=86,
        prompt_tokens=15_300,
        generation_tokens=3_153,
        prefix_queried_tokens=300,
        prefix_cached_tokens=150,
        encoder_queries=13,
        encoder_hits=11,
        preemptions=5,
        blocks_offloaded=20,
        blocks_loaded=4,
        steps=300,
    )
    assert activity_line(before, after, 10.0) == (
        "12 running, 3 waiting | prompt 1520.0 tokens/s, generation 310.3 tokens/s | KV cache 43% used | "
        "prefix hits 25% | encoder hits 75% | 2 preempted | blocks: 10 offloaded, 4 loaded"
    )


@pytest.mark.parametrize(("count", "text"), [(1, "encoding 1 image, about 12 s left"), (2, "encoding 2 images,")])
def test_images_in_progress_are_in_it(count: int, text: str):
    after = EngineStats(num_running=3, steps=9, images_in_progress=count, image_seconds_left=12.3)
    assert text in activity_line(IDLE, after, 1.0)


def test_what_did_not_happen_is_left_out():
    line = activity_line(IDLE, EngineStats(num_running=1, kv_blocks_total=200, steps=8), 1.0)
    assert line == "1 running, 0 waiting | prompt 0.0 tokens/s, generation 0.0 tokens/s | KV cache 0% used"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        pytest.param(IDLE, IDLE, False, id="idle"),
        pytest.param(EngineStats(), EngineStats(), False, id="an engine without blocks"),
        pytest.param(EngineStats(num_running=1, steps=7), IDLE, True, id="the last request was aborted"),
        pytest.param(EngineStats(steps=5), IDLE, True, id="all came and went in between"),
        pytest.param(IDLE, EngineStats(num_waiting=1, steps=7), True, id="the first step has not ended"),
    ],
)
def test_busy_engine_logs_until_it_falls_idle(before, after, said):
    assert (activity_line(before, after, 1.0) is not None) == said


class Engine:
    """Stats that a test changes, which say when they are asked for."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = EngineStats()
        self._asked = asyncio.Event()

    def __call__(self) -> EngineStats | None:
        self._asked.set()
        return self.stats

    async def asked(self, times: int = 1) -> None:
        for _ in range(times):
            self._asked.clear()
            await asyncio.wait_for(self._asked.wait(), 60)


def lines(caplog) -> list[str]:
    return [record.getMessage().partition(" |")[0] for record in caplog.records if "activity" in record.name]


async def test_lines_come_each_interval_while_busy(caplog):
    caplog.set_level(logging.INFO)
    engine = Engine()
    async with activity_log(engine, 0.01):
        await engine.asked(2)
        assert lines(caplog) == []
        engine.stats = EngineStats(num_running=2, steps=1)
        await engine.asked(3)
        assert lines(caplog)[:2] == ["2 running, 0 waiting"] * 2
        caplog.clear()
        engine.stats = EngineStats(steps=2)
        await engine.asked(3)
        assert lines(caplog)[-1:] == ["0 running, 0 waiting"]
        caplog.clear()
        await engine.asked(2)
    assert lines(caplog) == []


async def test_unlogged_activity_is_logged_at_the_end(caplog):
    caplog.set_level(logging.INFO)
    engine = Engine()
    async with activity_log(engine, 60):
        engine.stats = EngineStats(steps=3, generation_tokens=5)
        await asyncio.sleep(0)
    assert lines(caplog) == ["0 running, 0 waiting"]


async def test_nothing_is_logged_without_interval_or_engine(caplog):
    caplog.set_level(logging.INFO)
    engine = Engine()
    async with activity_log(engine, 0):
        engine.stats = EngineStats(steps=3)
    async with activity_log(engine, 0.01):
        engine.stats = None
        await engine.asked(2)
    assert lines(caplog) == []
