"""Chooses images to encode, and manages embeddings and cross-attention states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vlmserve.cache.encoder import EncoderCache
from vlmserve.scheduler.policy import reserved
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.resource import Resource
from vlmserve.scheduler.step_limits import StepLimits
from vlmserve.steps import Bytes, CrossStates, ImageEncoding, SchedulerOutput
from vlmserve.types import CrossInput, ImageInput


@dataclass(slots=True)
class _Budget:
    macs: float
    num_new: int

    @property
    def may_begin(self) -> bool:
        return self.num_new > 0 and self.macs >= 1

    def take(self, missing: float, wanted: Iterable[float]) -> int | None:
        """Return the MACs taken for an image that lacks `missing`, or None for all. wanted: of each image."""
        if missing <= self.macs:
            self.macs -= missing
            return None
        if self.macs < 1:
            return 0
        some = max(1, int(self.macs - reserved(missing, wanted, self.macs)))
        self.macs = max(0, self.macs - some)
        return some


class _Use(NamedTuple):
    image: ImageInput
    place: int
    """First token that needs it. -1: all tokens."""
    sizes: dict[bytes, int]
    budget: _Budget
    """The step's budget afterwards."""
    fits: bool = True
    """There is memory, and budget to start."""
    is_new: bool = False
    missing: float = 0
    some: int | None = None
    """MACs in this step. None: all that it lacks."""
    stored: Bytes | None = None

    @property
    def is_ready(self) -> bool:
        return self.fits and self.some is None


class _Plan(NamedTuple):
    """Uses of chunk ``start <= i < end``, up to the first that is not ready."""

    request: Request | None
    start: int
    end: int
    uses: list[_Use]


_NOTHING_PLANNED = _Plan(None, 0, 0, [])


class Images(Resource):
    """Encodes a whole image in one step if it has the time, otherwise in several, while a running request needs it."""

    def __init__(
        self,
        cache: EncoderCache,
        *,
        max_encoded_images: int,
        image_token_bytes: int,
        state_bytes: int,
        macs: Callable[[ImageInput], int],
    ) -> None:
        """macs: returns an image's MACs."""
        self.cache = cache
        self.queries = 0
        self.hits = 0
        self.loads = 0
        self.stored: Mapping[bytes, Bytes] = {}
        self._max_encoded_images = max_encoded_images
        self._image_token_bytes = image_token_bytes
        self._state_bytes = state_bytes
        self._macs = macs
        # key to missing MACs
        self.unfinished: dict[bytes, float] = {}
        # whose image is being encoded
        self.awaiting_image: set[bytes] = set()
        # still being encoded
        self.dropped: list[bytes] = []
        self._budget = _Budget(math.inf, max_encoded_images)
        self._plan = _NOTHING_PLANNED
        # of the images that running requests need next, while images are unfinished
        self._wanted: dict[bytes, float] = {}

    def begin_step(self, running: Sequence[Request], limits: StepLimits | None) -> None:
        # a last prompt token that needs an image is scheduled like a generated token
        generating, waiting = False, 0
        for request in running:
            num_uncomputed = request.num_uncomputed
            generating = generating or num_uncomputed == 1
            waiting += num_uncomputed > 1 and request.has_images
        macs = math.inf if limits is None else limits.tower_macs(waiting, generating=generating)
        self._budget = _Budget(macs, self._max_encoded_images)
        known, self._wanted = self._wanted, {}
        for request in running if self.unfinished else ():
            if request.num_computed >= request.num_limited:
                continue
            for image in request.images_for(request.num_computed, request.num_prompt_tokens)[:1]:
                if image.key in self.unfinished:
                    self._wanted[image.key] = self.unfinished[image.key]
                elif image.key not in self.cache:
                    self._wanted[image.key] = known.get(image.key) or self._macs(image)

    def end_step(self, step: SchedulerOutput) -> None:
        if step.has_work:
            step.embeddings_to_evict += self.dropped
            self.dropped = []

    def grow(self, request: Request, num_tokens: int, spare: Sequence[Request] = ()) -> int:
        """Return 0 if the next token needs an image that cannot begin in this step."""
        if self._budget.may_begin or request.cross is not None:
            return num_tokens
        spans = request.spans_between(request.num_computed, request.num_computed + 1)
        lacks = any(span.image.key not in self.cache and span.image.key not in self.stored for span in spans)
        return 0 if lacks else num_tokens

    def limit(self, request: Request, start: int, end: int) -> int:
        """The first token of an image that will not be ready."""
        if self._plan.request is not request or self._plan.start != start or self._plan.end < end:
            self._plan = _Plan(request, start, end, self._plan_uses(request, start, end))
        uses = self._plan.uses
        return end if not uses or uses[-1].is_ready else min(end, max(start, uses[-1].place))

    def settle(self, step: SchedulerOutput, request: Request, start: int, end: int, wanted: int) -> None:
        """Pin images until later tokens are computed, states while the request runs."""
        uses = [use for use in self._plan.uses if use.place < wanted]
        self._plan = _NOTHING_PLANNED
        if fitting := [use for use in uses if use.fits]:
            hits = {key for use in fitting for key in use.sizes if key in self.cache}
            # first, because a new image may evict unpinned ones
            pinned = {key for key in hits if self.cache.pin(key, request.request_id)}
            for use in fitting:
                self._use(step, request, use, pinned)
        for use in uses:
            if use.place < 0:
                self._note_states(step, request, use)

    def advance(self, request: Request, num_computed: int) -> None:
        for span in request.spans_between(request.num_computed, num_computed):
            if span.end <= num_computed:
                self._unpin_image(request, span.image.key, num_computed)
        if request.cross is not None:
            # the states do not need the image's features again
            self._unpin(request.cross.image.key, request)

    def fork(self, parent: Request, child: Request, *, first: bool) -> bool:
        if parent.cross_key is not None:
            self.cache.pin(parent.cross_key, child.request_id)
        return True

    def release(self, request: Request, *, resumes: bool = False) -> None:
        """Stop encoding images that no other request needs."""
        for span in request.image_spans:
            self._unpin(span.image.key, request)
        if request.cross is not None and request.cross_key is not None:
            for key in (request.cross_key, request.cross.image.key):
                self._unpin(key, request)

    def discard(self, request: Request, *, out_of_memory: bool) -> None:
        """After an out-of-memory error, parts of what only this request needs may be missing."""
        if not out_of_memory:
            return
        self.release(request)
        keys = [image.key for image in request.images_for(0, request.num_prompt_tokens)]
        for key in dict.fromkeys(keys if request.cross_key is None else [*keys, request.cross_key]):
            if key in self.cache and not self.cache.holders(key):
                self.cache.remove(key)
                self.dropped.append(key)

    def missing_after(self, request: Request, num_computed: int) -> dict[bytes, int]:
        """Bytes, by key, of images that later tokens need but memory lacks."""
        sizes: dict[bytes, int] = {}
        if request.cross is not None:
            sizes |= self._cross_sizes(request, request.cross)
            sizes.pop(request.cross_key or b"")
        for span in request.spans_between(num_computed, request.num_prompt_tokens):
            sizes |= self._sizes(span.image)
        return {key: size for key, size in sizes.items() if key not in self.cache}

    def _sizes(self, image: ImageInput) -> dict[bytes, int]:
        return {image.key: image.num_embeddings * self._image_token_bytes}

    def _cross_sizes(self, request: Request, cross: CrossInput) -> dict[bytes, int]:
        """Bytes by key, including the image unless the states are computed."""
        key = request.cross_key
        assert key is not None
        needs_image = key not in self.cache or key in self.awaiting_image
        return {key: cross.num_states * self._state_bytes} | (self._sizes(cross.image) if needs_image else {})

    def _plan_uses(self, request: Request, start: int, end: int) -> list[_Use]:
        needs = [(span.image, span.start, self._sizes(span.image)) for span in request.spans_between(start, end)]
        if request.cross is not None:
            needs.insert(0, (request.cross.image, -1, self._cross_sizes(request, request.cross)))
        budget, held, uses = self._budget, dict[bytes, int](), list[_Use]()
        for image, place, sizes in needs:
            use = self._plan_use(image, place, sizes, held, _Budget(budget.macs, budget.num_new))
            uses.append(use)
            if not use.is_ready:
                break
            budget = use.budget
            held |= sizes
        return uses

    def _plan_use(
        self, image: ImageInput, place: int, sizes: dict[bytes, int], held: dict[bytes, int], budget: _Budget
    ) -> _Use:
        """held: bytes by key that earlier uses pin. budget: reduced by this use."""
        is_open = image.key in sizes and image.key not in held
        is_new = is_open and image.key not in self.cache
        stored = self.stored.get(image.key) if is_new else None
        is_new = is_new and stored is None
        if (is_new and not budget.may_begin) or not self.cache.fits(held | sizes if held else sizes):
            return _Use(image, place, sizes, budget, fits=False)
        missing: float = self._macs(image) if is_new else 0
        if is_open and not is_new:
            missing = self.unfinished.get(image.key, 0)
        budget.num_new -= is_new
        some = budget.take(missing, self._wanted.values())
        return _Use(image, place, sizes, budget, is_new=is_new, missing=missing, some=some, stored=stored)

    def _use(self, step: SchedulerOutput, request: Request, use: _Use, pinned: set[bytes]) -> None:
        """pinned: keys that this chunk has just pinned; this use removes its own."""
        owner = request.request_id
        new = {key: size for key, size in use.sizes.items() if key not in self.cache}
        if new:
            step.embeddings_to_evict += self.cache.make_room(sum(new.values()))
        for key, size in new.items():
            self.cache.add(key, size)
            self.cache.pin(key, owner)
        if use.stored is not None and use.image.key in new:
            step.embeddings_to_place[use.image.key] = use.stored
            self.loads += 1
        if new or not pinned.isdisjoint(use.sizes):
            self.queries += 1
            self.hits += not use.is_new and use.stored is None
            request.num_encoded += use.is_new
        pinned.difference_update(use.sizes)
        self._budget = use.budget
        if use.is_new or use.missing:
            self._encode(step, use)

    def _note_states(self, step: SchedulerOutput, request: Request, use: _Use) -> None:
        cross, key = request.cross, request.cross_key
        assert cross is not None
        assert key is not None
        if not use.is_ready:
            if key in self.cache:
                self.awaiting_image.add(key)
        elif cross.image.key in use.sizes:
            self.awaiting_image.discard(key)
            step.cross_states.append(CrossStates(key, cross.image.key, cross.token_ids))

    def _encode(self, step: SchedulerOutput, use: _Use) -> None:
        key, image = use.image.key, use.image if use.is_new else None
        if use.some is not None:
            if use.some:
                step.encodings.append(ImageEncoding(key, use.some, image))
            self.unfinished[key] = use.missing - use.some
        elif image is not None:
            step.images_to_encode.append(image)
        else:
            del self.unfinished[key]
            step.encodings.append(ImageEncoding(key, None))

    def _unpin_image(self, request: Request, key: bytes, num_computed: int) -> None:
        """Keep a partly computed image. Later occurrences could leave no memory for the images in between."""
        if not any(s.image.key == key and s.start < num_computed < s.end for s in request.image_spans):
            self._unpin(key, request)

    def _unpin(self, key: bytes, request: Request) -> None:
        self.cache.unpin(key, request.request_id)
        if self.cache.holders(key):
            return
        if key in self.unfinished:
            del self.unfinished[key]
            self.cache.remove(key)
            self.dropped.append(key)
        elif key in self.awaiting_image:
            self.awaiting_image.remove(key)
            self.cache.remove(key)
