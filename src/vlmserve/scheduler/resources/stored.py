"""Waits for disk entries that requests need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vlmserve.cache.fetches import Fetches, Plan, Read
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.images import Images
from vlmserve.scheduler.resources.memory import Found, KVMemory
from vlmserve.scheduler.resources.resource import Resource
from vlmserve.scheduler.resources.states import StateMemory
from vlmserve.scheduler.resources.stored_prefix import StoredPrefix, stored_prefix
from vlmserve.scheduler.resources.stored_states import StoredStates, stored_states
from vlmserve.scheduler.step_limits import StepLimits
from vlmserve.steps import SchedulerOutput

MAX_DEFERRED = 32
"""Maximum requests per step that are looked up on disk, then wait for other reads."""


class EntryBytes(NamedTuple):
    """Bytes of a KV block and of a state."""

    block: int
    state: int = 0


class Stored(Resource):
    """Reads what memory lacks before memory and images look for it."""

    def __init__(self, fetches: Fetches, images: Images, memory: KVMemory, sizes: EntryBytes) -> None:
        self._fetches, self._images, self._memory = fetches, images, memory
        self._sizes = sizes
        # reading, or nothing to read
        self._asked: set[str] = set()
        # something to read
        self._deferred: set[str] = set()
        self._num_deferred = 0

    def begin_step(self, running: Sequence[Request], limits: StepLimits | None) -> None:
        self._num_deferred = 0

    def end_step(self, step: SchedulerOutput) -> None:
        self._fetches.end_step(step)

    def ready(self, request: Request) -> bool:
        name = request.request_id
        if name in self._asked:
            return self._fetches.is_done(name)
        may_begin = self._fetches.may_begin
        if not may_begin and (name in self._deferred or self._num_deferred >= MAX_DEFERRED):
            return False
        plan = self._plan(request)
        if plan is not None and not may_begin:
            self._deferred.add(name)
            self._num_deferred += 1
            return False
        self._deferred.discard(name)
        self._asked.add(name)
        if plan is not None:
            self._fetches.begin(name, plan)
        return self._fetches.is_done(name)

    def _plan(self, request: Request) -> Plan | None:
        has, memory, found = self._fetches.tier.has, self._memory, self._memory.find(request)
        prefix = None if memory.stores is None else self._prefix(request, found)
        spans = [(span.image.key, span.end) for span in request.image_spans]
        sizes = self._images.missing_after(request, found.num_tokens)
        images = [(key, size) for key, size in sizes.items() if has(key)]
        if not images and prefix is None:
            return None

        def run(read: Read) -> None:
            reach = found.num_tokens if prefix is None else prefix.read(read)
            needed = {key for key, end in spans if end > reach}
            for key, size in images:
                if key in needed or request.cross is not None:
                    read([key], size)

        return Plan(run, frozenset(key for key, _ in images))

    def _prefix(self, request: Request, found: Found) -> StoredPrefix | StoredStates | None:
        has, columns, (block, state) = self._fetches.tier.has, self._memory.columns, self._sizes
        if isinstance(self._memory, StateMemory):
            return stored_states(request, found, columns, has, block_bytes=block, state_bytes=state)
        prefix = stored_prefix(request, found, columns, block)
        return prefix if prefix is not None and any(map(has, prefix.first_keys)) else None

    def acquire(self, request: Request, running: Sequence[Request]) -> bool:
        self._keep_images(request, request.num_computed)
        return True

    def advance(self, request: Request, num_computed: int) -> None:
        self._keep_images(request, num_computed)

    def _keep_images(self, request: Request, num_computed: int) -> None:
        if self._fetches.contents:
            end = request.num_prompt_tokens
            later = request.images_for(num_computed, end) if num_computed < end else ()
            self._fetches.keep(request.request_id, {image.key for image in later})

    def release(self, request: Request, *, resumes: bool = False) -> None:
        self._asked.discard(request.request_id)
        self._deferred.discard(request.request_id)
        self._fetches.release(request.request_id)

    def wait(self, seconds: float) -> bool:
        return self._fetches.wait(seconds)
