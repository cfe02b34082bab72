"""Shares an `LLM`'s engine among threads: one steps it while the others wait."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from vlmserve.errors import ForkError, UnavailableError, UnknownModelError
from vlmserve.offline.requests import Generation, LoRARequest, OfflineRequest, Prepared, fitted
from vlmserve.settings.config import EngineConfig
from vlmserve.types import SamplingParams

if TYPE_CHECKING:
    from vlmserve.engine.protocol import VLMEngine
    from vlmserve.frontend.requests import RequestPreparer

logger = logging.getLogger(__name__)

_LOAD_INTERVAL = 0.002
"""Seconds between checks whether an adapter is loaded."""


class SharedEngine:
    """An engine that batches the requests of all threads.

    A thread adds requests and calls `step` until they finish. One call at a time steps the engine; the others wait.

    Garbage collection may call `forget` even inside a step, so it never waits: the stepping thread aborts requests.
    """

    def __init__(self, config: EngineConfig, folder: Path, preparer: RequestPreparer) -> None:
        self._config, self._folder, self.preparer = config, folder, preparer
        self._engine: VLMEngine | None = None
        self._process_id = os.getpid()
        self._closed = False
        self._loading = threading.Lock()
        self._turn = threading.Lock()
        """The thread that holds it may call the engine."""
        self._changed = threading.Condition()
        """Guards the next three attributes."""
        self._num_arriving = 0
        """Calls other than `step` that want the turn; they precede the next step."""
        self._is_stepping = False
        self._num_steps = 0
        self._generations: dict[str, Generation] = {}
        self._forgotten: deque[Sequence[Generation]] = deque()
        self._ids = itertools.count()
        self._adapters = AdapterNames()
        self._adapters_lock = threading.Lock()

    @property
    def engine(self) -> VLMEngine:
        """The engine, loaded on first use."""
        self.check()
        engine = self._engine
        if engine is None:
            with self._loading:
                self.check()
                engine = self._engine = self._engine or self._load()
        return engine

    def check(self) -> None:
        """Raise ForkError after a fork, UnavailableError after `close`."""
        if self._engine is not None and self._process_id != os.getpid():
            raise ForkError(
                f"process {self._process_id} loaded this LLM and cannot share it with its fork {os.getpid()}; "
                "create an LLM in each process"
            )
        if self._closed:
            raise UnavailableError("this LLM is closed; create another one")

    def _load(self) -> VLMEngine:
        from vlmserve.engine import create_engine

        gc.collect()  # a deleted model may be in garbage cycles
        engine = create_engine(self._config, self._folder)
        self.preparer.fit(engine.info)
        self._process_id = os.getpid()
        return engine

    def close(self) -> None:
        if self._closed or (self._engine is not None and self._process_id != os.getpid()):
            return
        with interrupts_held_back(), self._loading, self._arriving(), self._turn:
            if self._engine is not None:
                self._engine.abort(list(self._generations))
            self._closed, self._engine = True, None
            self._generations.clear()
        gc.collect()

    def add(self, prepared: Prepared, params: SamplingParams) -> OfflineRequest:
        """Queue all answers to a prompt, or none."""
        [added] = self.add_all([(prepared, params)])
        if isinstance(added, Exception):
            raise added
        return added

    def add_all(self, prompts: Iterable[tuple[Prepared, SamplingParams]]) -> list[OfflineRequest | Exception]:
        """Queue prompts as `add` does, in order. Errors take the places of rejected prompts."""
        engine = self.engine
        made = [self._make(engine, *one) for one in prompts]
        try:
            with interrupts_held_back(), self._change():
                return [one if isinstance(one, Exception) else self._queue(engine, one) for one in made]
        except BaseException:
            self.forget([one for one in made if isinstance(one, OfflineRequest)])
            raise

    def _make(self, engine: VLMEngine, prepared: Prepared, params: SamplingParams) -> OfflineRequest | Exception:
        try:
            prepared = fitted(prepared, params, engine.info)
            if params.grammar is not None:
                engine.grammars.check(params.grammar)  # compiles while other threads proceed
            return OfflineRequest(f"offline-{next(self._ids)}", prepared, params, self.preparer)
        except Exception as error:
            return error

    def _queue(self, engine: VLMEngine, request: OfflineRequest) -> OfflineRequest | Exception:
        try:
            for one, generation in zip(request.requests, request.generations, strict=True):
                engine.add(one)
                self._generations[generation.request_id] = generation
        except Exception as error:
            self.forget([request])
            return error
        return request

    def step(self) -> None:
        """Step the engine for all threads, or wait for another's step."""
        self.check()
        with interrupts_held_back():
            with self._changed:
                if self._is_stepping:
                    number = self._num_steps
                    self._changed.wait_for(lambda: self._num_steps != number)
                    return
                self._is_stepping = True
                self._changed.wait_for(lambda: not self._num_arriving)
            try:
                with self._own_turn() as engine:
                    engine.abort(self._deliver(engine))
            finally:
                with self._changed:
                    self._is_stepping = False
                    self._num_steps += 1
                    self._changed.notify_all()

    def _deliver(self, engine: VLMEngine) -> list[str]:
        stopped = []
        for output in engine.step():
            generation = self._generations.get(output.request_id)
            if generation is None:
                continue
            try:
                generation.take(output)
            except Exception as error:  # deliver the others' outputs
                logger.exception("the text of a request cannot be made")
                generation.fail(f"its text cannot be made: {type(error).__name__}: {error}")
            if generation.finish_reason is not None and output.finish_reason is None:
                stopped.append(output.request_id)
        return stopped

    def forget(self, requests: Sequence[OfflineRequest]) -> None:
        """Abort and drop requests. Never waits."""
        self._forgotten.extend(request.generations for request in requests)
        with interrupts_held_back():
            self._abort_if_free()

    def _abort_if_free(self) -> None:
        """The turn's holder repeats this at its end, so no forgotten request remains."""
        while self._forgotten and self._turn.acquire(blocking=False):
            try:
                self._abort_forgotten()
            finally:
                self._turn.release()

    def _abort_forgotten(self) -> None:
        while self._forgotten:
            generations = self._forgotten.popleft()
            known = [one for one in generations if self._generations.pop(one.request_id, None) is not None]
            if self._engine is not None:
                self._engine.abort([one.request_id for one in known if one.finish_reason is None])

    @contextmanager
    def _own_turn(self) -> Iterator[VLMEngine]:
        engine = self.engine
        with self._turn:
            self.check()
            self._abort_forgotten()
            yield engine
        self._abort_if_free()

    @contextmanager
    def _arriving(self) -> Iterator[None]:
        with self._changed:
            self._num_arriving += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_arriving -= 1
                self._changed.notify_all()

    @contextmanager
    def _change(self) -> Iterator[VLMEngine]:
        with self._arriving(), self._own_turn() as engine:
            yield engine

    def load_adapter(self, wanted: LoRARequest) -> str:
        """Return the engine's name for an adapter. Raises AdapterError, UnknownModelError."""
        with self._adapters_lock:
            with self._change() as engine:
                name, is_served = self._adapters.find(wanted, {one.name: one.path for one in engine.adapters})
                number = next(self._ids)
                if not is_served:
                    engine.load_adapter(number, name, wanted.lora_path)
            while not is_served:
                with self._change() as engine:
                    ended = [load for load in engine.finished_loads() if load.number == number]
                if ended and ended[0].error is not None:
                    raise ended[0].error
                is_served = bool(ended)
                time.sleep(0 if is_served else _LOAD_INTERVAL)
            self._adapters.loaded(wanted, name)
        return name


class AdapterNames:
    """Names of served adapters.

    A known name with another path gets its own, so concurrent callers never get each other's adapter.
    """

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._latest: dict[str, str] = {}

    def find(self, wanted: LoRARequest, served: Mapping[str, str]) -> tuple[str, bool]:
        """The adapter's name, and whether it is served. Raises UnknownModelError without a path."""
        name, path = wanted.lora_name, wanted.lora_path
        if not path:
            latest = self._latest.get(name, name)
            if latest not in served:
                message = f"there is no adapter {name!r:.100} here; give its lora_path"
                raise UnknownModelError(message, param="lora_request")
            return latest, True
        known = self._names.get((name, path))
        if known is not None and known in served:
            return known, True
        if served.get(name) == path:
            return name, True
        numbered = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
        return next(one for one in numbered if one not in served), False

    def loaded(self, wanted: LoRARequest, name: str) -> None:
        if wanted.lora_path:
            self._names[wanted.lora_name, wanted.lora_path] = name
            self._latest[wanted.lora_name] = name


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Delay SIGINT: an interrupted step would leave the engine unusable."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
