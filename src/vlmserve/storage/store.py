"""Storage for an event loop: a few threads do the work, and one deletes old data."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from vlmserve.errors import ConfigurationError, OverloadedError, StorageError
from vlmserve.folders import data_folder, expanded
from vlmserve.settings.config import ServerConfig
from vlmserve.storage.batches import Batches
from vlmserve.storage.conversations import Conversations
from vlmserve.storage.database import Database
from vlmserve.storage.files import Files
from vlmserve.storage.limits import Limits
from vlmserve.storage.responses import Responses
from vlmserve.storage.retention import Retention
from vlmserve.storage.tables import has_rows_of

logger = logging.getLogger(__name__)

_THREADS = 4
MAX_PENDING = 512
"""Running and waiting reads and writes."""
_MEMORY = "sqlite://"

Params = ParamSpec("Params")
Result = TypeVar("Result")


class Store:
    """Methods of the attributes block: call them through `run`."""

    def __init__(self, url: str, config: ServerConfig, clock: Callable[[], float] = time.time) -> None:
        """Raises ConfigurationError. clock: seconds since 1970."""
        threads = 1 if url == _MEMORY else _THREADS
        database = self.database = Database(url, threads)
        self.conversations = Conversations(database, clock, config.max_stored_bytes)
        self.responses = Responses(database, self.conversations, clock, config.max_stored_bytes)
        self.files = Files(database, clock, config.max_stored_bytes)
        self.batches = Batches(database, self.files, clock)
        self.limits = Limits(database, clock)
        self.retention = Retention(database, clock, config.storage_max_age, config.storage_max_bytes)
        self._room = threading.BoundedSemaphore(MAX_PENDING)
        self._workers = ThreadPoolExecutor(threads, "storage")
        self._closing = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, args=(config.storage_sweep_interval,), daemon=True)
        self._sweeper.start()

    async def run(self, work: Callable[Params, Result], /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """Run `work` in a thread. Raises its errors, and OverloadedError if too much waits.

        Work that has started finishes even if the caller is cancelled.
        """
        return await asyncio.wrap_future(self._submit(work, *args, **kwargs))

    def close(self) -> None:
        self._closing.set()
        self._sweeper.join()
        self._workers.shutdown()
        self.database.close()

    def _submit(self, work: Callable[Params, Result], /, *args: Params.args, **kwargs: Params.kwargs) -> Future[Result]:
        if not self._room.acquire(blocking=False):
            raise OverloadedError("Too many reads and writes of the history wait; try again later")
        future = self._workers.submit(work, *args, **kwargs)
        future.add_done_callback(lambda _: self._room.release())
        return future

    def _sweep(self, interval: float) -> None:
        while not self._closing.wait(interval):
            # Logged; the next sweep tries again.
            with contextlib.suppress(StorageError, OverloadedError):
                if deleted := self._submit(self.retention.sweep).result():
                    logger.info("Deleted %d old entries of the history", deleted)
                self._submit(self.limits.forget).result()


def open_store(config: ServerConfig) -> Store | None:
    """None if the configuration says "none", or nothing and the default folder is not writable.

    Raises ConfigurationError if a configured store does not open.
    """
    if config.storage_url is not None and config.storage_path is not None:
        raise ConfigurationError("give --storage-url or --storage-path, not both")
    match config.storage_url:
        case "none":
            return None
        case "memory":
            return Store(_MEMORY, config)
        case None:
            try:
                return Store(f"sqlite:///{_path(config).absolute()}", config)
            except ConfigurationError as error:
                if config.storage_path:
                    raise
                logger.warning("Responses, conversations and files are not kept: %s", error)
                return None
        case url:
            return Store(url, config)


def has_history(config: ServerConfig, owner: str) -> bool:
    """Return whether the configured history has data of an owner. Raises ConfigurationError and StorageError."""
    match config.storage_url:
        case "none" | "memory":
            return False
        case None:
            path = _path(config)
            if not path.is_file():
                return False
            url = f"sqlite:///{path.absolute()}"
        case url:
            pass
    database = Database(url, 1)
    try:
        with database.read() as connection:
            return has_rows_of(connection, owner)
    finally:
        database.close()


def _path(config: ServerConfig) -> Path:
    if config.storage_path:
        return expanded(config.storage_path)
    folder = data_folder()
    if folder is None:
        raise ConfigurationError("this user has no home folder: --storage-path names the file of the history")
    return folder / "history.db"
