"""Requests from messages, and which of them can never run on a model."""

from __future__ import annotations

import time

import msgspec

from vlmserve.adapters.store import Served
from vlmserve.cache.keys import adapted_image_key, root_key
from vlmserve.config import EngineConfig
from vlmserve.engine.adapters import AdapterLoading
from vlmserve.errors import InvalidRequestError, PromptTooLongError, UnknownModelError
from vlmserve.models.protocols import LoadedModel
from vlmserve.sampling.grammar import GrammarCompiler
from vlmserve.sampling.sampler import draw_seed
from vlmserve.scheduler.beams import Beams
from vlmserve.scheduler.request import Request
from vlmserve.types import KEY_BYTES, EngineRequest, ImageInput, ImageSpan, Prompt


class Intake:
    """Makes the scheduler's requests."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        identity: bytes,
        grammars: GrammarCompiler,
        adapters: AdapterLoading | None,
        max_len: int,
        max_mixed_len: int,
    ) -> None:
        """identity: see `cache_identity`. max_len: maximum tokens of a prompt and its answer. max_mixed_len: the same
        for requests with two block tables."""
        cross, size = model.cross, model.dtype.itemsize
        self.max_len = max_len
        self.image_token_bytes = (cross.feature_size if cross else model.language_model.image_width) * size
        """Bytes of an embedding in the encoder cache."""
        self.state_bytes = cross.state_size * size if cross else 0
        """Bytes of a cross-attention state in the encoder cache."""
        self._config, self._model, self.identity = config, model, identity
        self._grammars, self._adapters = grammars, adapters
        self._max_mixed_len = max_mixed_len
        self._num_accepted = 0

    def accept(self, request: EngineRequest) -> tuple[Request, Beams | None]:
        """Return the scheduler's request, and its beam search if it has one. Raises what `VLMEngine.add` raises."""
        for span in request.prompt.images:
            self._check_image(span.image, span.image.num_embeddings * self.image_token_bytes)
        self._check_times(request.prompt)
        self._check_cross(request.prompt)
        adapter = self._adapter(request.adapter)
        if adapter is not None and adapter.vision:
            request = msgspec.structs.replace(request, prompt=_with_adapter(request.prompt, adapter.digest))
        seed = request.params.seed
        first_position = self._model.language_model.first_position(len(request.prompt.token_ids))
        # Keys and values depend on the positions at which they were computed.
        identity = self.identity + (b" from %d" % first_position if first_position else b"")
        if request.params.grammar is not None:
            self._grammars.check(request.params.grammar)
        digest = b"" if adapter is None else adapter.digest
        scaling_root = self._scaling_root(request, adapter, identity)
        max_len = self.max_len if scaling_root is None else self._max_mixed_len
        beams = None
        if request.beams is not None:
            beams = Beams.start(request, self._model.end_token_ids, max_len - len(request.prompt.token_ids))
            request = msgspec.structs.replace(request, params=beams.params)
        queued = Request(
            request,
            root_key=root_key(identity, adapter=digest, salt=request.cache_salt),
            adapter=digest,
            scaling_root=scaling_root,
            seed=draw_seed(self._config.seed, self._num_accepted) if seed is None else seed,
            max_len=max_len,
            end_token_ids=self._model.end_token_ids,
            max_short_len=self._model.language_model.max_short_len,
            bidirectional=self._model.language_model.bidirectional,
        )
        queued.arrived, queued.arrived_at = time.perf_counter(), time.time()
        self._num_accepted += 1
        return queued, beams

    def _adapter(self, name: str) -> Served | None:
        """Return a request's adapter. Raises UnknownModelError if it is not served."""
        if not name:
            return None
        if self._adapters is None:
            raise UnknownModelError(f"there is no adapter {name!r:.100}: start with --enable-lora", param="model")
        return self._adapters.store[name]

    def _scaling_root(self, request: EngineRequest, adapter: Served | None, identity: bytes) -> bytes | None:
        """The root key of a request's scaling pass; None: it has none. Raises PromptTooLongError where the cache has no
        room for two passes."""
        known = None if adapter is None or self._adapters is None else self._adapters.store.scaling_pass(adapter)
        if known is None:
            return None
        if len(request.prompt.token_ids) >= self._max_mixed_len:
            raise PromptTooLongError.of(len(request.prompt.token_ids), self._max_mixed_len - 1, param="messages")
        return root_key(identity, adapter=known, salt=request.cache_salt)

    def _check_times(self, prompt: Prompt) -> None:
        """Check that the frames of slow videos have no positions after the model's last one."""
        times = sum(int(span.image.grid[0] * span.image.frame_step) for span in prompt.images if span.image.grid)
        most = self._model.max_position
        if len(prompt.token_ids) + times > most:
            raise PromptTooLongError(
                f"the frames of the videos span {times:,} positions, and the model has {most:,} in all; "
                "send less of them, or a higher fps",
                param="messages",
            )

    def _check_cross(self, prompt: Prompt) -> None:
        cross = prompt.cross
        if self._model.cross is None:
            if cross is not None:
                raise InvalidRequestError("this model has no cross attention for an image", param="prompt")
            return
        if cross is None:
            raise InvalidRequestError("this model takes one image with each request", param="messages")
        self._model.cross.check(cross)
        num_bytes = cross.image.num_embeddings * self.image_token_bytes + cross.num_states * self.state_bytes
        self._check_image(cross.image, num_bytes)

    def _check_image(self, image: ImageInput, num_bytes: int) -> None:
        """num_bytes: in the encoder cache."""
        if self._model.vision is not None:
            self._model.vision.check(image.pixels.shape, image.num_embeddings, image.tiling)
        if len(image.key) != KEY_BYTES:
            raise InvalidRequestError(f"an image's key has {len(image.key)} bytes, not {KEY_BYTES}", param="prompt")
        if num_bytes > self._config.encoder_cache_memory:
            raise InvalidRequestError(
                f"an image of {image.num_embeddings} embeddings does not fit into the encoder cache, of which it "
                f"takes {num_bytes:,} bytes; raise --encoder-cache-memory",
                param="messages",
            )


def _with_adapter(prompt: Prompt, digest: bytes) -> Prompt:
    """A prompt whose images are encoded with an adapter."""

    def adapted(span: ImageSpan) -> ImageSpan:
        key = adapted_image_key(span.image.key, digest)
        return ImageSpan(msgspec.structs.replace(span.image, key=key, adapter=digest), span.start)

    return msgspec.structs.replace(prompt, images=tuple(adapted(span) for span in prompt.images))
