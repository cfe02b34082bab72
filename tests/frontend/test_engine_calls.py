"""Calls to an engine process about its state and its adapters."""

from __future__ import annotations

import asyncio

import pytest

from vlmserve.engine.messages import AdapterDone, Inspected, LoadAdapter, ToEngine
from vlmserve.errors import UnavailableError, VLMServeError
from vlmserve.frontend.engine_calls import EngineCalls
from vlmserve.types import AdapterInfo, EngineSnapshot, EngineStats

ADAPTER = AdapterInfo(name="red", path="/red", digest="00", rank=8, num_bytes=64)


async def test_replies_after_the_end_are_ignored() -> None:
    sent: list[ToEngine] = []
    gone: list[VLMServeError] = []
    calls = EngineCalls(sent.append, lambda: gone[0] if gone else None)
    waiting = [asyncio.ensure_future(one) for one in (calls.load_adapter("red", "/red"), calls.inspect())]
    await asyncio.sleep(0)
    [load, _] = sent
    assert isinstance(load, LoadAdapter)
    gone.append(UnavailableError("The engine is being closed"))
    calls.end()
    calls.reply(AdapterDone(load.number, None, [ADAPTER]))
    calls.reply(Inspected(EngineSnapshot(EngineStats(), [])))
    for one in waiting:
        with pytest.raises(UnavailableError, match="being closed"):
            await one
    assert calls.adapters == {"red": ADAPTER}


async def test_replies_to_callers_that_left_are_ignored() -> None:
    sent: list[ToEngine] = []
    calls = EngineCalls(sent.append, lambda: None)
    first = asyncio.ensure_future(calls.load_adapter("red", "/red"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    [load] = sent
    assert isinstance(load, LoadAdapter)
    calls.reply(AdapterDone(load.number, None, [ADAPTER]))
    assert calls.adapters == {"red": ADAPTER}
