"""Entries on disk that requests need. A request waits while they are read, and others overtake it."""

from __future__ import annotations

from vlmserve.cache.fetches import Fetches, Read
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.images import Images
from vlmserve.scheduler.resources.memory import KVMemory
from vlmserve.scheduler.resources.resource import Resource
from vlmserve.scheduler.resources.stored_prefix import stored_prefix


class Stored(Resource):
    """Reads the KV blocks of a request that memory lacks, and images that later tokens are computed from.

    It is asked before memory and images, so that they find what was read.
    """

    def __init__(self, fetches: Fetches, images: Images, memory: KVMemory, block_bytes: int) -> None:
        """block_bytes: of a KV block's content."""
        self._fetches, self._images, self._memory = fetches, images, memory
        self._block_bytes = block_bytes
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
        has, memory, prefix = self._fetches.tier.has, self._memory, None
        found = memory.find(request)
        if memory.stores is not None:
            prefix = stored_prefix(request, found, memory.columns, self._block_bytes)
            prefix = prefix if prefix is not None and any(map(has, prefix.first_keys)) else None
        spans = [(span.image.key, span.end) for span in request.image_spans]
        sizes = self._images.missing_after(request, found.num_tokens)
        images = [(key, size) for key, size in sizes.items() if has(key)]
        if not images and prefix is None:
            return

        def plan(read: Read) -> None:
            reach = found.num_tokens if prefix is None else prefix.read(read)
            needed = {key for key, end in spans if end > reach}
            for key, size in images:
                if key in needed or request.cross is not None:
                    read(key, size)

        self._fetches.begin(request.request_id, plan)

    def advance(self, request: Request, num_computed: int) -> None:
        if num_computed >= request.num_prompt_tokens:
            self.release(request)

    def release(self, request: Request, *, resumes: bool = False) -> None:
        self._asked.discard(request.request_id)
        self._fetches.release(request.request_id)

    def wait(self, seconds: float) -> bool:
        return self._fetches.wait(seconds)
