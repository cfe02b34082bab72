"""Which images go through the vision tower in a step, and whose embeddings and cross-attention states are in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from vlmserve.cache.encoder import EncoderCache
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.shares import reserved
from vlmserve.scheduler.step_limits import StepLimits
from vlmserve.steps import CrossStates, ImageEncoding, SchedulerOutput
from vlmserve.types import CrossInput, ImageInput


class ImageScheduler:
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
        products: Callable[[ImageInput], int],
    ) -> None:
        """image_token_bytes: of an embedding. state_bytes: of a state that requests attend to by cross attention.
        products: multiplications that it takes to encode an image."""
        self.cache = cache
        self.queries = 0
        self.hits = 0
        self._max_encoded_images = max_encoded_images
        self._image_token_bytes = image_token_bytes
        self._state_bytes = state_bytes
        self._products = products
        # Images that are being encoded, and how many multiplications each of them lacks.
        self._unfinished: dict[bytes, float] = {}
        # Cross-attention states that have their place, and whose image is being encoded.
        self._awaiting_image: set[bytes] = set()
        # Images that nobody needs any more, and that the runner still encodes.
        self._dropped: list[bytes] = []
        self._budget = math.inf
        self._num_begun = 0
        # MACs of images that running requests need next; known while there are unfinished ones.
        self._wanted: dict[bytes, float] = {}

    @property
    def unfinished(self) -> Mapping[bytes, float]:
        """Images in progress by key, and the MACs that each lacks."""
        return self._unfinished

    def begin_step(self, limits: StepLimits | None, running: Sequence[Request]) -> None:
        """Plan another step. limits: of all steps; None: there are none."""
        # The last token of a prompt, which may need an image, is scheduled like a token that was generated.
        generating = any(request.num_uncomputed == 1 for request in running)
        waiting = sum(request.num_uncomputed > 1 and request.has_images for request in running)
        self._budget = math.inf if limits is None else limits.tower_macs(waiting, generating=generating)
        self._num_begun = 0
        known, self._wanted = self._wanted, {}
        for request in running if self._unfinished else ():
            for image in request.images_for(request.num_computed, request.num_prompt_tokens)[:1]:
                if image.key in self._unfinished:
                    self._wanted[image.key] = self._unfinished[image.key]
                elif image.key not in self.cache:
                    self._wanted[image.key] = known.get(image.key) or self._products(image)

    def end_step(self, step: SchedulerOutput) -> None:
        """The step is planned and will run."""
        step.embeddings_to_evict += self._dropped
        self._dropped = []

    def schedule(self, step: SchedulerOutput, request: Request, image: ImageInput) -> bool:
        """Pin an image for a request, planning its encoding if need be. Returns whether its embeddings will be there
        when the step computes tokens."""
        key = image.key
        if key not in self.cache:
            evicted = self.cache.make_room(image.num_embeddings * self._image_token_bytes) if self._may_begin else None
            if evicted is None:
                return False
            step.embeddings_to_evict += evicted
            self._add(request, key, image.num_embeddings * self._image_token_bytes)
            self.queries += 1
            request.num_encoded += 1
            return self._begin(step, image)
        if self.cache.pin(key, request.request_id):
            self.queries += 1
            self.hits += 1
        return self._go_on(step, key)

    def schedule_cross_states(self, step: SchedulerOutput, request: Request, cross: CrossInput) -> bool:
        """Pin the states that a request attends to for as long as it runs, planning their computation if need be.

        The image's features are pinned until they are computed. Returns whether they will be there when the step
        computes tokens.
        """
        key, image, owner = request.cross_key, cross.image, request.request_id
        assert key is not None
        is_new = False
        if key in self.cache:
            if self.cache.pin(key, owner):
                self.queries += 1
                self.hits += 1
            if key not in self._awaiting_image:
                return True
            self.cache.pin(image.key, owner)
        else:
            is_new = image.key not in self.cache
            if not self._reserve_cross(step, request, cross):
                return False
            self.queries += 1
            self.hits += not is_new
            request.num_encoded += is_new
        if not (self._begin(step, image) if is_new else self._go_on(step, image.key)):
            self._awaiting_image.add(key)
            return False
        self._awaiting_image.discard(key)
        step.cross_states.append(CrossStates(key, image.key, cross.token_ids))
        return True

    def set_computed(self, request: Request, before: int, num_computed: int) -> None:
        """Tokens ``before <= i < num_computed`` of a request are computed: unpin what it needs no more."""
        for span in request.spans_between(before, num_computed):
            if span.end <= num_computed:
                self._unpin_image(request, span.image.key, num_computed)
        if request.cross is not None:
            # The cross-attention states were computed from the image's features, which are not needed any more.
            self._unpin(request.cross.image.key, request)

    def fork(self, parent: Request, child: Request) -> None:
        """A child takes its parent's place, and needs what that needs."""
        if parent.cross_key is not None:
            self.cache.pin(parent.cross_key, child.request_id)

    def release(self, request: Request) -> None:
        """Let go of everything that a request has pinned. What nobody else needs is not encoded any further."""
        for span in request.image_spans:
            self._unpin(span.image.key, request)
        if request.cross is not None and request.cross_key is not None:
            for key in (request.cross_key, request.cross.image.key):
                self._unpin(key, request)

    def forget(self, request: Request) -> None:
        """Give up what a request that was released was computed from, since memory ran out: some of it may not be
        there. What others need stays."""
        keys = [image.key for image in request.images_for(0, request.num_prompt_tokens)]
        for key in dict.fromkeys(keys if request.cross_key is None else [*keys, request.cross_key]):
            if key in self.cache and not self.cache.holders(key):
                self.cache.remove(key)
                self._dropped.append(key)

    @property
    def _may_begin(self) -> bool:
        return self._num_begun < self._max_encoded_images and self._budget >= 1

    def _reserve_cross(self, step: SchedulerOutput, request: Request, cross: CrossInput) -> bool:
        """Make room for states that are not there, and for their image."""
        key, image = request.cross_key, cross.image
        assert key is not None
        sizes = {key: cross.num_states * self._state_bytes}
        known = image.key in self.cache
        if known:
            self.cache.pin(image.key, request.request_id)
        else:
            sizes[image.key] = image.num_embeddings * self._image_token_bytes
        evicted = self.cache.make_room(sum(sizes.values())) if known or self._may_begin else None
        if evicted is None:
            self._unpin(image.key, request)
            return False
        step.embeddings_to_evict += evicted
        for new, size in sizes.items():
            self._add(request, new, size)
        return True

    def _add(self, request: Request, key: bytes, size: int) -> None:
        self.cache.add(key, size)
        self.cache.pin(key, request.request_id)

    def _begin(self, step: SchedulerOutput, image: ImageInput) -> bool:
        """Encode an image, or begin with it. Returns whether all of it is encoded in this step."""
        products = self._products(image)
        self._num_begun += 1
        if products <= self._budget:
            self._budget -= products
            step.images_to_encode.append(image)
            return True
        some = self._share(products)
        step.encodings.append(ImageEncoding(image.key, some, image))
        self._unfinished[image.key] = products - some
        return False

    def _go_on(self, step: SchedulerOutput, key: bytes) -> bool:
        """Encode more of an image that has been begun, if it is not finished. Returns whether it is then."""
        missing = self._unfinished.get(key)
        if missing is None:
            return True
        if missing <= self._budget:
            self._budget -= missing
            del self._unfinished[key]
            step.encodings.append(ImageEncoding(key, None))
            return True
        if self._budget >= 1:
            some = self._share(missing)
            self._unfinished[key] = missing - some
            step.encodings.append(ImageEncoding(key, some))
        return False

    def _share(self, missing: float) -> int:
        """Take MACs of the step's budget for an image that lacks more: all, or what it does not leave to others."""
        some = max(1, int(self._budget - reserved(missing, self._wanted.values(), self._budget)))
        self._budget = max(0, self._budget - some)
        return some

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
