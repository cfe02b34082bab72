"""Slow work is shared fairly among clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

from tests.waiting import until
from vlmserve.cancellation import client
from vlmserve.sampling.trials import SlowGrammarError
from vlmserve.server.fair_queue import FairQueue, FairThreads
from vlmserve.server.service import Service
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig
from vlmserve.types import Grammar


async def _start(queue: FairQueue, name: str, log: list[str], release: asyncio.Event) -> asyncio.Task[None]:
    async def work() -> None:
        client.set(name)
        assert await queue.acquire() == name
        try:
            log.append(name)
            await release.wait()
        finally:
            queue.release(name)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


def run(check: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    async def main() -> None:
        await check(asyncio.Event())

    asyncio.run(main())


def test_one_client_leaves_room_for_others() -> None:
    async def check(release: asyncio.Event) -> None:
        log: list[str] = []
        queue = FairQueue(4, 3)
        tasks = [await _start(queue, "many", log, release) for _ in range(10)]
        assert log == ["many"] * 3
        tasks.append(await _start(queue, "one", log, release))
        assert log == ["many"] * 3 + ["one"]
        release.set()
        await asyncio.gather(*tasks)
        assert log.count("many") == 10

    run(check)


def test_client_with_least_running_work_is_next() -> None:
    async def check(release: asyncio.Event) -> None:
        log: list[str] = []
        queue = FairQueue(2, 2)
        first, second = asyncio.Event(), asyncio.Event()
        tasks = [await _start(queue, "a", log, one) for one in (first, second)]
        tasks += [await _start(queue, name, log, release) for name in ("a", "a", "b")]
        first.set()
        await until(lambda: len(log) == 3)
        assert log == ["a", "a", "b"]
        second.set()
        release.set()
        await asyncio.gather(*tasks)

    run(check)


def test_cancelled_work_frees_its_place() -> None:
    async def check(release: asyncio.Event) -> None:
        log: list[str] = []
        queue = FairQueue(1, 1)
        running, waiting = [await _start(queue, "a", log, release) for _ in range(2)]
        waiting.cancel()
        running.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        release.set()
        await (await _start(queue, "b", log, release))
        assert log == ["a", "b"]

    run(check)


def test_abandoned_work_counts_until_its_thread_is_free() -> None:
    async def check(release: asyncio.Event) -> None:
        log: list[str] = []
        begun, over = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            over.wait()

        queue = FairThreads("work", 1, 1)
        with queue.executor:
            leaving = asyncio.create_task(queue.run(work))
            await until(begun.is_set)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            release.set()
            task = await _start(queue, "next", log, release)
            for _ in range(10):
                await asyncio.sleep(0)
            assert log == []
            over.set()
            await task
            assert log == ["next"]

    run(check)


def test_clients_with_equal_work_take_turns() -> None:
    async def check(release: asyncio.Event) -> None:
        log: list[str] = []
        queue = FairQueue(1, 1)
        tasks = [await _start(queue, "many", log, release) for _ in range(6)]
        tasks.append(await _start(queue, "one", log, release))
        release.set()
        await asyncio.gather(*tasks)
        assert log.index("one") == 2

    run(check)


def test_slow_grammars_of_clients_take_turns() -> None:
    class Answers:
        def knows_grammar(self, grammar: Grammar) -> bool:
            return False

        def check_grammar(self, grammar: Grammar, tools: object = None, *, quick: bool = False) -> None:
            if quick:
                raise SlowGrammarError("slow")

    async def main() -> None:
        service = Service(EngineConfig(), MediaConfig(), ServerConfig())
        service.preparation.open(cast(Any, SimpleNamespace(answers=Answers())))
        done: list[str] = []

        async def ask(name: str, number: int) -> None:
            client.set(name)
            await service.preparation.check_grammar(Grammar.regex(f"{name}{number}"))
            done.append(name)

        try:
            await asyncio.gather(*(ask("many", number) for number in range(40)), ask("one", 0))
        finally:
            service.close()
        assert done.index("one") < 20

    asyncio.run(main())


def test_slow_urls_of_one_client_delay_no_other() -> None:
    over = threading.Event()

    class Conversation:
        def __init__(self, messages: list[dict[str, Any]]) -> None:
            self._url = messages[0]["content"][0]["image_url"]["url"]

        def prompt(self) -> str:
            if self._url.endswith("slow"):
                over.wait(60)
            return client.get()

    class Preparer:
        def conversation(self, messages: list[dict[str, Any]], *_: object, **__: object) -> Conversation:
            return Conversation(messages)

    async def main() -> None:
        service = Service(EngineConfig(), MediaConfig(), ServerConfig())
        service.preparation.open(cast(Any, Preparer()))

        async def ask(name: str, url: str) -> object:
            client.set(name)
            part = {"type": "image_url", "image_url": {"url": f"http://example.com/{url}"}}
            return await service.preparation.prepare([{"role": "user", "content": [part]}])

        slow = [asyncio.create_task(ask("many", "slow")) for _ in range(200)]
        try:
            assert await asyncio.wait_for(asyncio.create_task(ask("one", "quick")), 20) == "one"
            assert not any(task.done() for task in slow)
        finally:
            over.set()
            await asyncio.gather(*slow)
            service.close()

    asyncio.run(main())
