"""Entries on disk that requests need. A request waits while they are read, and others overtake it."""

from __future__ import annotations

from vlmserve.cache.fetches import Fetches, Read
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.images import Images
from vlmserve.scheduler.resources.memory import KVMemory
from vlmserve.scheduler.resources.resource import Resource


class Stored(Resource):
    """Reads images that tokens after a request's cached prefix are computed from.

    It is asked before memory and images, so that they find what was read.
    """

    def __init__(self, fetches: Fetches, images: Images, memory: KVMemory) -> None:
        self._fetches, self._images, self._memory = fetches, images, memory
        self._asked: set[str] = set()

    def ready(self, request: Request) -> bool:
        name = request.request_id
        if name not in self._asked:
            if not self._fetches.may_begin:
                return False
            self._asked.add(name)
            self._begin(request)
        return self._fetches.is_done(name)

    def _begin(self, request: Request) -> None:
        """Read in a thread what is on disk. Most requests have nothing there, and wait for no thread."""
        images = self._images.missing_after(request, self._memory.find(request).num_tokens)
        stored = [one for one in images.items() if self._fetches.tier.has(one[0])]

        def plan(read: Read) -> None:
            for key, size in stored:
                read(key, size)

        if stored:
            self._fetches.begin(request.request_id, plan)

    def advance(self, request: Request, num_computed: int) -> None:
        if num_computed >= request.num_prompt_tokens:
            self.release(request)

    def release(self, request: Request, *, resumes: bool = False) -> None:
        self._asked.discard(request.request_id)
        self._fetches.release(request.request_id)

    def wait(self, seconds: float) -> bool:
        return self._fetches.wait(seconds)
