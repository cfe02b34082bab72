"""The processes of models that load on demand, and the requests that wait for them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil

from vlmserve.errors import UnavailableError, VLMServeError
from vlmserve.folders import expanded
from vlmserve.models.footprint import loads_into_main_memory
from vlmserve.scaleout.launch import MemberProcess
from vlmserve.scaleout.member_messages import Failed, Loading, News, Up, WorkerLaunch
from vlmserve.scaleout.ondemand.catalogue import Expected, Listed, expect
from vlmserve.scaleout.ondemand.shelf import Admit, Load, Shelf, Slot, Unload

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 60.0
"""Seconds until another attempt to load a model that failed often."""
STOP_SECONDS = 10.0
"""Seconds that an unused worker gets to end."""
_MEASURE_SECONDS = 5.0
"""Seconds between measurements of memory."""


@dataclass(eq=False)
class Ticket:
    model: Model
    run: int
    """The run of the model that it uses."""
    admitted: asyncio.Future[None] | None = None
    """None: it did not wait."""


@dataclass(eq=False)
class Model:
    listed: Listed
    expected: Expected | None = None
    """None before the first request."""
    slot: Slot | None = None
    process: MemberProcess | None = None
    pids: tuple[int, ...] = ()
    url: str | None = None
    """The address of its process, also while it unloads: it still reports the tokens of its last answers."""
    run: int = 0
    """Number of the current or next process."""
    progress: str = ""
    failure: str = ""
    """Why the latest load failed."""
    failures: int = 0
    """Failed loads in a row."""
    retry_at: float = 0.0
    began: float = 0.0
    waiting: list[Ticket] = field(default_factory=list)
    estimating: asyncio.Task[None] | None = None
    loads: int = 0
    failed_loads: int = 0
    crashes: int = 0
    load_seconds: float = 0.0
    """Total time of all loads."""

    @property
    def state(self) -> str:
        """ "unloaded", "loading", "loaded", "unloading" or "failed"."""
        state = "unloaded" if self.slot is None else self.slot.state
        return "failed" if state == "unloaded" and self.failure else state

    @property
    def reserved_bytes(self) -> int:
        return 0 if self.slot is None or self.slot.state == "unloaded" else self.slot.size


class Pool:
    """Starts and ends workers. Use it from one event loop.

    start: starts a worker; called in a thread. connect: gets the URLs of all workers when they change.
    """

    def __init__(
        self,
        listed: Iterable[Listed],
        shelf: Shelf,
        start: Callable[[WorkerLaunch], MemberProcess],
        connect: Callable[[list[str]], None],
        token: str,
        *,
        load_timeout: float,
        host: str = "127.0.0.1",
        prefix: str = "",
    ) -> None:
        """load_timeout: maximum seconds of a load. host: address of workers. prefix: of their names."""
        self.models = {one.name: Model(one) for one in listed}
        self.shelf = shelf
        self._start = start
        self._connect = connect
        self._token, self._load_timeout = token, load_timeout
        self._host, self._prefix = host, prefix
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._changed = asyncio.Event()
        self._run(self._measure_all())

    async def enter(self, name: str) -> Ticket:
        """Wait until a model is loaded, and keep it loaded until `leave`. Raises UnavailableError."""
        model = self.models[name]
        self._check(model)
        if model.slot is None:
            await self._estimate(model)
        assert model.slot is not None
        ticket = Ticket(model, model.run)
        if self.shelf.arrive(model.slot):
            return ticket
        ticket.admitted = self._loop.create_future()
        model.waiting.append(ticket)
        self._act()
        try:
            await ticket.admitted
        except BaseException:
            if ticket in model.waiting:
                model.waiting.remove(ticket)
                self.shelf.give_up(model.slot)
                self._act()
            elif ticket.admitted.cancelled() or ticket.admitted.exception() is None:
                self.leave(ticket)
            raise
        return ticket

    def leave(self, ticket: Ticket) -> None:
        if ticket.run == ticket.model.run and ticket.model.slot is not None:
            self.shelf.leave(ticket.model.slot)
            self._act()

    def report(self, name: str, running: int, idle_seconds: float) -> None:
        """Note requests that did not `enter`. idle_seconds: since the latest one."""
        if (slot := self.models[name].slot) is not None:
            self.shelf.report(slot, running, idle_seconds)
            if slot.is_idle:
                self._act()

    async def estimate_local(self) -> None:
        """Learn how much memory the models on this machine take."""
        for model in self.models.values():
            if model.slot is None and expanded(model.listed.engine.model).exists():
                model.estimating = model.estimating or self._run(self._expect(model))
                await asyncio.wait((model.estimating,))

    def most_recent(self) -> str | None:
        loaded = [slot for slot in self.shelf.slots.values() if slot.takes_requests]
        return max(loaded, key=lambda slot: slot.last_use).name if loaded else None

    async def close(self, grace: float = STOP_SECONDS) -> None:
        """End all processes, and kill slow ones after `grace` seconds."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for model in self.models.values():
            self._fail(model, UnavailableError("The server is shutting down"))
            if model.process is not None:
                model.process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._wait_for_processes()
        self.kill()
        await self._wait_for_processes()

    def kill(self) -> None:
        for model in self.models.values():
            if model.process is not None:
                model.process.kill()

    async def _wait_for_processes(self) -> None:
        while any(model.state in ("loading", "loaded", "unloading") for model in self.models.values()):
            self._changed.clear()
            await self._changed.wait()

    def _check(self, model: Model) -> None:
        if self._closing:
            raise UnavailableError("The server is shutting down")
        pause = model.retry_at - time.monotonic()
        if model.failure and model.state == "failed" and pause > 0:
            raise UnavailableError(f"{model.listed.name} could not be loaded: {model.failure}", retry_after=pause)

    async def _estimate(self, model: Model) -> None:
        """Raises UnavailableError if the model can never be loaded."""
        if model.estimating is None:
            model.estimating = self._run(self._expect(model))
        estimating = model.estimating
        done, _ = await asyncio.wait((estimating,), timeout=self._load_timeout)
        if self._closing:
            raise UnavailableError("The server is shutting down")
        if not done:
            raise UnavailableError(f"{model.listed.name} is still being downloaded or read; try again later")
        estimating.result()
        if model.slot is None:
            raise UnavailableError(f"{model.listed.name} could not be loaded: {model.failure}")

    async def _expect(self, model: Model) -> None:
        try:
            expected = await _in_thread(lambda: expect(model.listed))
        except (VLMServeError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            self._note_failure(model, str(error))
        else:
            if expected.total > self.shelf.budget:
                needed, budget = expected.total / 1e9, self.shelf.budget / 1e9
                reason = f"it needs about {needed:.1f} GB, and --models-memory leaves {budget:.1f} GB for models"
                self._note_failure(model, reason)
            else:
                model.expected = expected
                model.slot = self.shelf.add(model.listed.name, expected.total)
        finally:
            model.estimating = None

    def _act(self) -> None:
        if self._closing:
            return
        for action in self.shelf.plan():
            model = self.models[action.slot.name]
            match action:
                case Load():
                    self._load(model)
                case Unload():
                    self._unload(model)
                case Admit():
                    for ticket in model.waiting:
                        ticket.run = model.run
                        if ticket.admitted is not None and not ticket.admitted.done():
                            ticket.admitted.set_result(None)
                    model.waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        pause = self.shelf.next_plan()
        self._timer = None if pause is None else self._loop.call_later(pause, self._act)

    def _load(self, model: Model) -> None:
        model.progress, model.failure, model.began = "", "", time.monotonic()
        model.process, model.pids, model.url = None, (), None
        threading.Thread(target=self._follow, args=(model, self._launch(model)), daemon=True).start()

    def _unload(self, model: Model) -> None:
        assert model.process is not None
        logger.info("Unloading %s: another model needs its memory", model.listed.name)
        model.process.terminate()
        # A gateway may have sent it a request since its latest report.
        grace = STOP_SECONDS + model.listed.server.shutdown_grace
        self._loop.call_later(grace, self._kill_if, model, model.run, "unloading")

    def _kill_if(self, model: Model, run: int, state: str, failure: str = "") -> None:
        if model.run == run and model.state == state and model.process is not None:
            model.failure = failure
            model.process.kill()

    def _launch(self, model: Model) -> WorkerLaunch:
        listed, expected = model.listed, model.expected
        assert expected is not None
        engine = listed.engine.model_copy(update={"kv_cache_memory": expected.kv_cache, "load": "eager"})
        return WorkerLaunch(
            self._prefix + listed.name, self._token, engine.model_dump_json(), listed.media.model_dump_json(),
            _inner(listed, self._host),
        )  # fmt: skip

    def _follow(self, model: Model, launch: WorkerLaunch) -> None:
        """Report a process's news until it ends. Runs in a thread."""
        try:
            process = self._start(launch)
        except OSError as error:
            self._call(self._gone, model, f"no process could be started: {error}")
            return
        self._call(self._started, model, process)
        with contextlib.closing(process):
            try:
                for news in process.news():
                    self._call(self._hear, model, news)
            except msgspec.MsgspecError as error:
                process.kill()
                logger.error("The process of %s wrote no message: %s", model.listed.name, error)
            code = process.wait()
        self._call(self._gone, model, f"its process ended with exit status {code}")

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _started(self, model: Model, process: MemberProcess) -> None:
        model.process = process
        if self._closing:
            process.terminate()
        limit = self._load_timeout
        reason = f"it took longer than {limit:g} s (--models-load-timeout)"
        left = model.began + limit - time.monotonic()
        self._loop.call_later(left, self._kill_if, model, model.run, "loading", reason)

    def _hear(self, model: Model, news: News) -> None:
        match news:
            case Loading(progress):
                model.progress = progress
            case Failed(message):
                model.failure = message
            case Up(url, engine):
                assert model.process is not None
                model.pids = (model.process.pid,) if engine is None else (model.process.pid, engine)
                model.url = url
                self._run(self._open(model, model.run))

    async def _open(self, model: Model, run: int) -> None:
        self._connect_all()
        taken = await asyncio.to_thread(private_memory, model.pids)
        if model.run != run or model.slot is None or model.expected is None:
            return
        seconds = time.monotonic() - model.began
        model.loads, model.failures, model.load_seconds = model.loads + 1, 0, model.load_seconds + seconds
        is_measured = taken and loads_into_main_memory(model.listed.engine)
        size = taken + model.expected.growth if is_measured else model.slot.size
        self.shelf.loaded(model.slot, size)
        logger.info("Loaded %s in %.1f s; it may take %.2f GB", model.listed.name, seconds, size / 1e9)
        if size > self.shelf.budget:
            logger.warning("--models-memory leaves only %.2f GB for models", self.shelf.budget / 1e9)
        self._act()

    def _gone(self, model: Model, reason: str) -> None:
        assert model.slot is not None
        state, name = model.slot.state, model.listed.name
        model.run += 1
        model.process, model.pids, model.url = None, (), None
        self.shelf.gone(model.slot)
        if state == "loading" and not self._closing:
            self._note_failure(model, model.failure or reason)
            self._fail(model, UnavailableError(f"{name} could not be loaded: {model.failure}"))
        elif state == "loaded" and not self._closing:
            model.crashes += 1
            logger.error("%s has crashed: %s; the next request loads it again", name, model.failure or reason)
            model.failure = ""
        self._connect_all()
        self._changed.set()
        self._act()

    def _note_failure(self, model: Model, reason: str) -> None:
        model.failure, model.failures = reason, model.failures + 1
        model.failed_loads += 1
        model.retry_at = time.monotonic() + min(_LONGEST_PAUSE, 2.0 ** (model.failures - 1))
        logger.error("%s could not be loaded: %s", model.listed.name, reason)

    def _fail(self, model: Model, error: VLMServeError) -> None:
        for ticket in model.waiting:
            if model.slot is not None:
                self.shelf.give_up(model.slot)
            if ticket.admitted is not None and not ticket.admitted.done():
                ticket.admitted.set_exception(error)
        model.waiting.clear()

    def _connect_all(self) -> None:
        self._connect([model.url for model in self.models.values() if model.url is not None])

    async def _measure_all(self) -> None:
        """Correct the sizes of models that take more than expected."""
        while True:
            await asyncio.sleep(_MEASURE_SECONDS)
            for model in self.models.values():
                if model.state == "loaded" and loads_into_main_memory(model.listed.engine):
                    run, taken = model.run, await asyncio.to_thread(private_memory, model.pids)
                    if model.run == run and model.slot is not None:
                        self.shelf.resize(model.slot, max(model.slot.size, taken))
            self._act()

    def _run(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _in_thread(work: Callable[[], Expected]) -> Expected:
    """Download a model in a thread that neither keeps other work waiting nor the server from ending."""
    result: concurrent.futures.Future[Expected] = concurrent.futures.Future()
    result.set_running_or_notify_cancel()  # the server's end does not cancel it

    def run() -> None:
        try:
            made = work()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(made)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(result)


def _inner(listed: Listed, host: str) -> str:
    """The gateway checks keys and limits; by default, workers store nothing."""
    own = listed.server
    update = {
        "host": host, "port": 0, "enable_page": False, "access_log": False, "api_key": (), "api_keys_file": None,
        "served_model_name": listed.shown, "max_restarts": 0, "sleep_after": 0.0, "max_batches": 0,
        "otlp_traces_endpoint": None,
    }  # fmt: skip
    if own.storage_url is None and own.storage_path is None:
        update["storage_url"] = "none"
    return own.model_copy(update=update).model_dump_json()


def private_memory(pids: Iterable[int]) -> int:
    """Bytes that would be free without these processes and their children; 0: unknown."""
    return sum(map(_private, {process for pid in pids for process in _family(pid)}))


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _private(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0
