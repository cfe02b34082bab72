"""Calls to an engine process about its state and adapters."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlmserve.engine.messages import (
    AdapterDone,
    Failure,
    Inspect,
    Inspected,
    LoadAdapter,
    MapBlocks,
    Mapped,
    ToEngine,
    UnloadAdapter,
)
from vlmserve.errors import VLMServeError
from vlmserve.types import AdapterInfo, BlockMap, EngineSnapshot


class EngineCalls:
    """All calls raise EngineDeadError and UnavailableError."""

    def __init__(self, send: Callable[[ToEngine], None], gone: Callable[[], VLMServeError | None]) -> None:
        """gone: returns the error of calls to an engine that has exited."""
        self._send, self._gone = send, gone
        self._queries: dict[type[Inspect | MapBlocks], asyncio.Future[Any]] = {}
        self._changes: dict[int, asyncio.Future[Failure | None]] = {}
        """Unfinished loads and unloads of adapters, by number."""
        self._numbers = itertools.count()
        self.adapters: dict[str, AdapterInfo] = {}
        """Adapters that the engine serves, by name."""

    async def inspect(self) -> EngineSnapshot:
        """The engine's state between two of its steps."""
        snapshot: EngineSnapshot = await self._query(Inspect())
        return snapshot

    async def map_blocks(self) -> BlockMap:
        blocks: BlockMap = await self._query(MapBlocks())
        return blocks

    async def load_adapter(self, name: str, path: str, pool: Mapping[str, str] | None = None) -> AdapterInfo:
        """Load an adapter, replacing the adapter of this name. pool: see `VLMEngine.load_adapter`. Raises
        AdapterError.
        """
        await self._change(LoadAdapter(next(self._numbers), name, path, None if pool is None else dict(pool)))
        return self.adapters[name]

    async def unload_adapter(self, name: str) -> None:
        """Raises UnknownModelError if the engine does not serve it."""
        await self._change(UnloadAdapter(next(self._numbers), name))

    def reply(self, message: Inspected | Mapped | AdapterDone) -> None:
        match message:
            case Inspected(snapshot):
                self._end_query(Inspect, snapshot)
            case Mapped(blocks):
                self._end_query(MapBlocks, blocks)
            case AdapterDone(number, reason, adapters):
                self.serve(adapters)
                change = self._changes.pop(number, None)
                if change is not None and not change.done():  # else the caller left, or the client closes
                    change.set_result(reason)

    def serve(self, adapters: Sequence[AdapterInfo]) -> None:
        self.adapters = {adapter.name: adapter for adapter in adapters}

    def end(self) -> None:
        """Fail all calls because the engine has exited."""
        changes, self._changes = self._changes, {}
        for change in changes.values():
            if not change.done() and (error := self._gone()) is not None:
                change.set_exception(error)
        for message in list(self._queries):
            self._end_query(message, None)

    def _check(self) -> None:
        if (error := self._gone()) is not None:
            raise error

    async def _change(self, message: LoadAdapter | UnloadAdapter) -> None:
        self._check()
        done = self._changes[message.number] = asyncio.get_running_loop().create_future()
        self._send(message)
        if (failure := await done) is not None:
            raise failure.error()

    async def _query(self, message: Inspect | MapBlocks) -> Any:
        self._check()
        if type(message) not in self._queries:
            self._queries[type(message)] = asyncio.get_running_loop().create_future()
            self._send(message)
        # One query for concurrent callers, because a busy engine answers slowly.
        answer = await asyncio.shield(self._queries[type(message)])
        if answer is None:
            self._check()
        return answer

    def _end_query(self, message: type[Inspect | MapBlocks], answer: EngineSnapshot | BlockMap | None) -> None:
        query = self._queries.pop(message, None)
        if query is not None:
            query.set_result(answer)
