"""Which images go through the vision tower in a step, and whose embeddings and cross-attention states are in memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vlmserve.cache.encoder import EncoderCache
from vlmserve.scheduler.policy import reserved
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.resource import Resource
from vlmserve.scheduler.step_limits import StepLimits
from vlmserve.steps import CrossStates, ImageEncoding, SchedulerOutput
from vlmserve.types import CrossInput, ImageInput


@dataclass(slots=True)
class _Budget:
    """The rest of a step's budget for images."""

    macs: float
    num_new: int
    """Images that may be begun."""

    @property
    def may_begin(self) -> bool:
        return self.num_new > 0 and self.macs >= 1

    def take(self, missing: float, wanted: Iterable[float]) -> int | None:
        """Take MACs for an image that lacks `missing`. Return None for all, or what it does not leave to others.

        wanted: MACs that each image lacks.
        """
        if missing <= self.macs:
            self.macs -= missing
            return None
        if self.macs < 1:
            return 0
        some = max(1, int(self.macs - reserved(missing, wanted, self.macs)))
        self.macs = max(0, self.macs - some)
        return some


class Images(Resource):
    """Owns the images' places in the encoder cache.

    An image is encoded whole in one step if the step has time for it, and goes through the tower in several steps
    otherwise. Until then nobody can use its place. It goes on as long as a running request needs it.
    """

    def __init__(
        self,
        cache: EncoderCache,
        *,
        max_encoded_images: int,
        image_token_bytes: int,
        state_bytes: int,
        macs: Callable[[ImageInput], int],
    ) -> None:
        """image_token_bytes: of an embedding. state_bytes: of a state that requests attend to by cross attention.
        macs: MACs of encoding an image."""
        self.cache = cache
        self.queries = 0
        self.hits = 0
        self._max_encoded_images = max_encoded_images
        self._image_token_bytes = image_token_bytes
        self._state_bytes = state_bytes
        self._macs = macs
        # Images that are being encoded, and how many MACs each of them lacks.
        self._unfinished: dict[bytes, float] = {}
        # Cross-attention states that have their place, and whose image is being encoded.
        self._awaiting_image: set[bytes] = set()
        # Images that nobody needs any more, and that the runner still encodes.
        self._dropped: list[bytes] = []
        self._budget = _Budget(math.inf, max_encoded_images)
        # MACs of images that running requests need next; known while there are unfinished ones.
        self._wanted: dict[bytes, float] = {}

    @property
    def unfinished(self) -> Mapping[bytes, float]:
        """Images in progress by key, and the MACs that each lacks."""
        return self._unfinished

    def begin_step(self, running: Sequence[Request], limits: StepLimits | None) -> None:
        # The last token of a prompt, which may need an image, is scheduled like a token that was generated.
        generating = any(request.num_uncomputed == 1 for request in running)
        waiting = sum(request.num_uncomputed > 1 and request.has_images for request in running)
        macs = math.inf if limits is None else limits.tower_macs(waiting, generating=generating)
        self._budget = _Budget(macs, self._max_encoded_images)
        known, self._wanted = self._wanted, {}
        for request in running if self._unfinished else ():
            for image in request.images_for(request.num_computed, request.num_prompt_tokens)[:1]:
                if image.key in self._unfinished:
                    self._wanted[image.key] = self._unfinished[image.key]
                elif image.key not in self.cache:
                    self._wanted[image.key] = known.get(image.key) or self._macs(image)

    def end_step(self, step: SchedulerOutput) -> None:
        if step.has_work:
            step.embeddings_to_evict += self._dropped
            self._dropped = []

    def limit(self, request: Request, start: int, end: int) -> int:
        """Return the first token of the first image that will not be encoded when the step computes tokens."""
        budget, held = copy.copy(self._budget), dict[bytes, int]()
        cross = request.cross
        if cross is not None and not self._would_use(cross.image, self._cross_sizes(request, cross), budget, held):
            return start
        for span in request.spans_between(start, end):
            if not self._would_use(span.image, self._sizes(span.image), budget, held):
                return max(start, span.start)
        return end

    def settle(self, step: SchedulerOutput, request: Request, start: int, end: int, wanted: int) -> None:
        """Pin images and states, and encode images up to the first that is not encoded in this step.

        Images are pinned until tokens after them are computed, states as long as the request runs.
        """
        if request.cross is not None and not self._use_states(step, request, request.cross):
            return
        for span in request.spans_between(start, end):
            # All that are there first: another image of the chunk may take the place of what is not pinned.
            if span.image.key in self.cache and self.cache.pin(span.image.key, request.request_id):
                self.queries += 1
                self.hits += 1
        for span in request.spans_between(start, wanted):
            if not self._use(step, request, span.image, self._sizes(span.image)):
                return

    def advance(self, request: Request, num_computed: int) -> None:
        for span in request.spans_between(request.num_computed, num_computed):
            if span.end <= num_computed:
                self._unpin_image(request, span.image.key, num_computed)
        if request.cross is not None:
            # The cross-attention states were computed from the image's features, which are not needed any more.
            self._unpin(request.cross.image.key, request)

    def fork(self, parent: Request, child: Request, *, first: bool) -> bool:
        if parent.cross_key is not None:
            self.cache.pin(parent.cross_key, child.request_id)
        return True

    def release(self, request: Request, *, resumes: bool = False) -> None:
        """Unpin everything. Images that no other request needs are not encoded any further."""
        for span in request.image_spans:
            self._unpin(span.image.key, request)
        if request.cross is not None and request.cross_key is not None:
            for key in (request.cross_key, request.cross.image.key):
                self._unpin(key, request)

    def discard(self, request: Request, *, out_of_memory: bool) -> None:
        """After an out-of-memory error, drop all that only this request needs: some of it may not be there."""
        if not out_of_memory:
            return
        self.release(request)
        keys = [image.key for image in request.images_for(0, request.num_prompt_tokens)]
        for key in dict.fromkeys(keys if request.cross_key is None else [*keys, request.cross_key]):
            if key in self.cache and not self.cache.holders(key):
                self.cache.remove(key)
                self._dropped.append(key)

    def _sizes(self, image: ImageInput) -> dict[bytes, int]:
        return {image.key: image.num_embeddings * self._image_token_bytes}

    def _cross_sizes(self, request: Request, cross: CrossInput) -> dict[bytes, int]:
        """Bytes of states, and of their image unless the states are computed."""
        key = request.cross_key
        assert key is not None
        needs_image = key not in self.cache or key in self._awaiting_image
        return {key: cross.num_states * self._state_bytes} | (self._sizes(cross.image) if needs_image else {})

    def _would_use(self, image: ImageInput, sizes: dict[bytes, int], budget: _Budget, held: dict[bytes, int]) -> bool:
        """Return what `_use` will return after uses that left `budget` and pinned `held`."""
        is_new = image.key in sizes and image.key not in self.cache and image.key not in held
        if not self.cache.fits(held | sizes) or (is_new and not budget.may_begin):
            return False
        missing: float = self._macs(image) if is_new else 0
        if image.key in sizes and image.key not in held:
            missing = missing or self._unfinished.get(image.key, 0)
        held |= sizes
        budget.num_new -= is_new
        return budget.take(missing, self._wanted.values()) is None

    def _use(self, step: SchedulerOutput, request: Request, image: ImageInput, sizes: dict[bytes, int]) -> bool:
        """Pin keys, and encode an image if its key is among them. Return whether all will be there when the step
        computes tokens. sizes: bytes by key."""
        owner = request.request_id
        is_new = image.key in sizes and image.key not in self.cache
        new = {key: size for key, size in sizes.items() if key not in self.cache}
        if (is_new and not self._budget.may_begin) or (new and not self.cache.fits(sizes)):
            return False
        pinned = [self.cache.pin(key, owner) for key in sizes if key in self.cache]
        if new:
            step.embeddings_to_evict += self.cache.make_room(sum(new.values()))
        for key, size in new.items():
            self.cache.add(key, size)
            self.cache.pin(key, owner)
        if new or any(pinned):
            self.queries += 1
            self.hits += not is_new
            request.num_encoded += is_new
        return self._encode(step, image, is_new=is_new) if image.key in sizes else True

    def _use_states(self, step: SchedulerOutput, request: Request, cross: CrossInput) -> bool:
        """Pin the states that a request attends to, and their image until they are computed. Return whether they will
        be there when the step computes tokens."""
        key, sizes = request.cross_key, self._cross_sizes(request, cross)
        assert key is not None
        if not self._use(step, request, cross.image, sizes):
            if key in self.cache:
                self._awaiting_image.add(key)
            return False
        if cross.image.key in sizes:
            self._awaiting_image.discard(key)
            step.cross_states.append(CrossStates(key, cross.image.key, cross.token_ids))
        return True

    def _encode(self, step: SchedulerOutput, image: ImageInput, *, is_new: bool) -> bool:
        """Begin or continue to encode an image, if it is not finished. Return whether it is then."""
        key = image.key
        if not is_new and key not in self._unfinished:
            return True
        missing = self._macs(image) if is_new else self._unfinished[key]
        self._budget.num_new -= is_new
        some = self._budget.take(missing, self._wanted.values())
        if some is not None:
            if some:
                step.encodings.append(ImageEncoding(key, some, image if is_new else None))
            self._unfinished[key] = missing - some
            return False
        if is_new:
            step.images_to_encode.append(image)
        else:
            del self._unfinished[key]
            step.encodings.append(ImageEncoding(key, None))
        return True

    def _unpin_image(self, request: Request, key: bytes, num_computed: int) -> None:
        """Unpin an image unless the first `num_computed` tokens end in the middle of it.

        An image that occurs again later in the prompt is unpinned as well: kept, it could leave no memory for the
        images in between.
        """
        if not any(s.image.key == key and s.start < num_computed < s.end for s in request.image_spans):
            self._unpin(key, request)

    def _unpin(self, key: bytes, request: Request) -> None:
        self.cache.unpin(key, request.request_id)
        if self.cache.holders(key):
            return
        if key in self._unfinished:
            del self._unfinished[key]
            self.cache.remove(key)
            self._dropped.append(key)
        elif key in self._awaiting_image:
            self._awaiting_image.remove(key)
            self.cache.remove(key)
