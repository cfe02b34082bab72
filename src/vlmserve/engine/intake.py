"""Converts messages to the scheduler's requests, and rejects requests that can never run."""

from __future__ import annotations

import time

import msgspec

from vlmserve.adapters.store import Served
from vlmserve.cache.keys import adapted_image_key, root_key
from vlmserve.engine.adapters import AdapterLoading
from vlmserve.engine.loading import CacheSizes
from vlmserve.errors import InvalidRequestError, PromptTooLongError, UnknownModelError
from vlmserve.layer_specs import CHUNK
from vlmserve.models.protocols import LoadedModel
from vlmserve.sampling.grammar import GrammarCompiler
from vlmserve.sampling.sampler import draw_seed
from vlmserve.scheduler.beams import Beams
from vlmserve.scheduler.request import Request
from vlmserve.settings.config import EngineConfig
from vlmserve.steps import bidirectional_spans
from vlmserve.types import KEY_BYTES, EngineRequest, ImageInput, ImageSpan, Prompt


class Intake:
    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        identity: bytes,
        grammars: GrammarCompiler,
        adapters: AdapterLoading | None,
        sizes: CacheSizes,
    ) -> None:
        cross, size = model.cross, model.dtype.itemsize
        self.image_token_bytes = (cross.feature_size if cross else model.language_model.image_width) * size
        """Bytes of an embedding in the encoder cache."""
        self.state_bytes = cross.state_size * size if cross else 0
        """Bytes of a cross-attention state in the encoder cache."""
        self._config, self._model, self.identity = config, model, identity
        self._grammars, self._adapters = grammars, adapters
        self._sizes = sizes
        self.max_len = self._longest()
        """Maximum tokens of a prompt and its answer."""
        self._num_accepted = 0

    def accept(self, request: EngineRequest) -> tuple[Request, Beams | None]:
        """Return the scheduler's request, and its beam search if any. Raises the errors of `VLMEngine.add`."""
        for span in request.prompt.images:
            self._check_image(span.image, span.image.num_embeddings * self.image_token_bytes)
        self._check_times(request.prompt)
        self._check_cross(request.prompt)
        adapter = self._adapter(request.adapter)
        if adapter is not None and adapter.vision:
            request = msgspec.structs.replace(request, prompt=_with_adapter(request.prompt, adapter.digest))
        seed = request.params.seed
        first_position = self._model.language_model.first_position(len(request.prompt.token_ids))
        # Keys and values depend on their positions.
        identity = self.identity + (b" from %d" % first_position if first_position else b"")
        if adapter is not None and adapter.mixes and self._sizes.slots == 1:
            raise InvalidRequestError(
                "X-LoRA takes two states of the state cache, which has room for one: raise --state-cache-memory"
            )
        if request.params.grammar is not None:
            self._grammars.check(request.params.grammar)
        digest = b"" if adapter is None else adapter.digest
        scaling_root = self._scaling_root(request, adapter, identity)
        max_len = self._max_len_of(request.prompt, passes=1 if scaling_root is None else 2)
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
        if not name:
            return None
        if self._adapters is None:
            raise UnknownModelError(f"there is no adapter {name!r:.100}: start with --enable-lora", param="model")
        return self._adapters.store[name]

    def _scaling_root(self, request: EngineRequest, adapter: Served | None, identity: bytes) -> bytes | None:
        known = None if adapter is None or self._adapters is None else self._adapters.store.scaling_pass(adapter)
        return None if known is None else root_key(identity, adapter=known, salt=request.cache_salt)

    def _longest(self, passes: int = 1, span: int = 0) -> int:
        """Return the maximum tokens of a request. span: maximum tokens that must be computed in one step."""
        chunk = max(self._config.max_num_batched_tokens, span)
        if self._sizes.slots:
            chunk += CHUNK  # see `StateMemory`
        sizes = self._sizes
        return sizes.of_tokens.fitting(sizes.pages // passes, chunk, sizes.max_model_len)

    def _max_len_of(self, prompt: Prompt, passes: int) -> int:
        """Return the maximum tokens of a request. Raises PromptTooLongError if the prompt leaves no room."""
        placements = [span.placement for span in prompt.images]
        spans = bidirectional_spans(placements, len(prompt.token_ids), self._model.language_model.bidirectional)
        if passes == 1 and not spans:
            return self.max_len
        longest = self._longest(passes, max([last - first for first, last in spans], default=0))
        if len(prompt.token_ids) >= longest:
            raise PromptTooLongError.of(len(prompt.token_ids), longest - 1, param="messages")
        return longest

    def _check_times(self, prompt: Prompt) -> None:
        grids = [(span.image.grid, span.image.frame_step) for span in prompt.images]
        times = sum(int(grid[0] * step) for grid, step in grids if isinstance(grid, tuple))
        most = self._model.max_position
        if len(prompt.token_ids) + times > most:
            raise PromptTooLongError(
                f"the videos span {times:,} positions, and the model has {most:,}; send fewer frames or a higher fps",
                param="messages",
            )

    def _check_cross(self, prompt: Prompt) -> None:
        cross = prompt.cross
        if self._model.cross is None:
            if cross is not None:
                raise InvalidRequestError("this model has no cross attention for an image", param="prompt")
            return
        if cross is None:
            raise InvalidRequestError("this model needs one image with each request", param="messages")
        self._model.cross.check(cross)
        num_bytes = cross.image.num_embeddings * self.image_token_bytes + cross.num_states * self.state_bytes
        self._check_image(cross.image, num_bytes)

    def _check_image(self, image: ImageInput, num_bytes: int) -> None:
        if self._model.vision is not None:
            self._model.vision.check(image.pixels.shape, image.num_embeddings, image.tiling)
        if len(image.key) != KEY_BYTES:
            raise InvalidRequestError(f"an image's key has {len(image.key)} bytes, not {KEY_BYTES}", param="prompt")
        if num_bytes > self._config.encoder_cache_memory:
            raise InvalidRequestError(
                f"an image of {image.num_embeddings} embeddings needs {num_bytes:,} bytes, more than the "
                "encoder cache has; raise --encoder-cache-memory",
                param="messages",
            )


def _with_adapter(prompt: Prompt, digest: bytes) -> Prompt:

    def adapted(span: ImageSpan) -> ImageSpan:
        key = adapted_image_key(span.image.key, digest)
        return ImageSpan(msgspec.structs.replace(span.image, key=key, adapter=digest), span.start)

    return msgspec.structs.replace(prompt, images=tuple(adapted(span) for span in prompt.images))
