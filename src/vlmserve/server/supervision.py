"""Restarts a dead engine, and unloads an idle one until a request needs it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from vlmserve.engine.heartbeat import INTERVAL
from vlmserve.errors import EngineDeadError, VLMServeError
from vlmserve.frontend.client import EngineClient
from vlmserve.server.service import Service

logger = logging.getLogger(__name__)

_LONGEST_BACKOFF = 60.0


class Supervisor:
    """`close` closes the engine, too. load_time: seconds of the first load; clients get it as Retry-After."""

    def __init__(
        self,
        service: Service,
        client: EngineClient,
        start: Callable[[], Awaitable[EngineClient]],
        load_time: float = 0.0,
    ) -> None:
        self._service = service
        self._client = client
        self._start = start
        self._load_time = load_time
        self._crashes = 0
        self._started = time.monotonic()
        self._served = service.metrics.num_served
        service.back_at = 0.0

    async def run(self) -> None:
        """Restart the engine when it dies, and unload it after `sleep_after` idle seconds, until the service closes.

        Raises EngineDeadError after more than `max_restarts` deaths in a row. An answered request or `restart_window`
        seconds of running end a row.
        """
        while True:
            if not await self._wait_until_dead():
                await self._sleep()
                continue
            if self._service.phase == "closing":
                return
            if self._is_sound():
                self._crashes = 0
            await self._restart(self._client.death or "The engine ended")

    async def close(self) -> None:
        await self._client.close()

    async def _wait_until_dead(self) -> bool:
        """Kills a hung engine. Returns False if it is idle and should sleep."""
        client, config = self._client, self._service.config
        dying = asyncio.ensure_future(client.died.wait())
        try:
            while not dying.done():
                await asyncio.wait([dying], timeout=INTERVAL)
                if config.engine_timeout and client.heartbeat.silence >= config.engine_timeout:
                    client.kill(f"The engine's process did not respond for {client.heartbeat.silence:.0f} s")
                elif config.step_timeout and client.heartbeat.step_seconds >= config.step_timeout:
                    client.kill(f"The engine was at one step for {client.heartbeat.step_seconds:.0f} s")
                elif self._is_idle():
                    return False
        finally:
            dying.cancel()
        return True

    def _is_idle(self) -> bool:
        service, limit = self._service, self._service.config.sleep_after
        if not limit or service.phase == "closing" or self._client.num_unfinished:
            return False
        return service.demand.idle_seconds >= limit

    async def _sleep(self) -> None:
        """A failed load is not repeated before another request."""
        service = self._service
        service.replace(None)
        await self._client.close()
        logger.info("%s is unloaded; the next request loads it", service.model_name)
        while True:
            await service.demand.wanted.wait()
            began = time.monotonic()
            try:
                self._client = await self._start()
            except (VLMServeError, OSError) as error:
                logger.error("%s could not be loaded: %s", service.model_name, error)
                service.demand.failed(str(error))
                continue
            break
        self._begin(began)
        logger.info("%s is loaded again, in %.1f s", service.model_name, self._load_time)

    def _is_sound(self) -> bool:
        long_enough = time.monotonic() - self._started >= self._service.config.restart_window
        return long_enough or self._service.metrics.num_served > self._served

    async def _restart(self, reason: str) -> None:
        while True:
            backoff = self._count_crash(reason)
            await self._client.close()
            self._service.back_at = time.monotonic() + backoff + self._load_time
            logger.warning("The engine is restarted in %g s (number %d in a row)", backoff, self._crashes)
            await asyncio.sleep(backoff)
            began = time.monotonic()
            try:
                self._client = await self._start()
            except (VLMServeError, OSError) as error:  # such as too little memory for a process
                reason = str(error)
                logger.error("The engine did not start again: %s", reason)
                continue
            break
        self._begin(began)
        logger.warning("The engine runs again, as process %d", self._client.process.pid)

    def _begin(self, began: float) -> None:
        self._started = time.monotonic()
        self._load_time = self._started - began
        self._served = self._service.metrics.num_served
        self._service.replace(self._client)

    def _count_crash(self, reason: str) -> float:
        """Seconds to wait before the next restart. Raises EngineDeadError after too many."""
        config = self._service.config
        self._crashes += 1
        if self._crashes > config.max_restarts:
            times = f"{self._crashes} times in a row" if self._crashes > 1 else "once"
            raise EngineDeadError(f"{reason}. The engine has died {times} (--max-restarts); the server exits")
        self._service.metrics.count_restart()
        return min(_LONGEST_BACKOFF, config.restart_backoff * 2.0 ** (self._crashes - 1))
