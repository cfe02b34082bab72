"""The messages between the scheduler and the model runner: one step, and its output.

Both are values: they hold all that the other side needs and refer to nothing that either side changes later, so a step
can be sent to another process, recorded, or run while the next one is planned. The runner keeps the state of each
request until it is finished; the scheduler sends only what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vlmserve.tasks import GENERATE, Task, TaskResult
from vlmserve.types import Bidirectional, ImageInput, ImagePlacement, SamplingParams, Thoughts, TokenLogprobs

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""Contents of a cache's entry, ``[bytes]``."""
BlockIds: TypeAlias = tuple[tuple[int, ...], ...]
"""KV blocks by pass of the model and column of the cache, see `CacheLayout`. Empty: no table has any."""


def bidirectional_spans(
    images: Sequence[ImagePlacement], num_tokens: int, bidirectional: Bidirectional | None
) -> tuple[tuple[int, int], ...]:
    """Tokens ``first <= i < last`` of a prompt with these images that attend to each other in both directions."""
    if bidirectional == "images":
        return tuple(image.shown for image in images)
    if bidirectional == "prefix":
        return tuple((0, image.end) for image in images[:1])
    return () if bidirectional is None else ((0, num_tokens),)


class BlockCopy(NamedTuple):
    """A KV block or a slot of states to copy: from the device to host memory (save), back (load), or on the device.
    fill: a block gets a content that was read from disk; source is its number in `SchedulerOutput.block_contents`."""

    kind: Literal["save", "load", "copy", "fill"]
    source: int
    target: int


class StateStep(NamedTuple):
    """Slots that one pass of a step reads and writes for a request. A slot is in all layers with states."""

    slot: int
    """Working slot, which gets the state after the last token of the step."""
    source: int
    """Slot of the state after the tokens before the step, or `NO_SLOT`."""
    checkpoints: tuple[tuple[int, int], ...] = ()
    """Numbers of tokens of the sequence, and the slots that get the states after these tokens. The working slot as well
    where the computation is cut only."""


class CrossStates(msgspec.Struct, frozen=True):
    """States that a decoder attends to by cross attention, to be computed from an image and a text.

    key: under which they are cached. image_key: of the image's features, which are in memory by then. token_ids: of
    the text that is encoded together with the image; none for the image alone.
    """

    key: bytes
    image_key: bytes
    token_ids: list[int]


class AdapterLoad(NamedTuple):
    """An adapter to put into a slot, in place of what is there, before the step runs. digest: by which it is known."""

    slot: int
    digest: bytes


class ImageEncoding(msgspec.Struct, frozen=True):
    """An image that goes through the vision tower in several steps, and how far it gets in this one.

    products: multiplications of the tower; None: all that it lacks, and its embeddings are there when the step computes
    tokens. image: with the first of these steps and with no other.
    """

    key: bytes
    products: int | None
    image: ImageInput | None = None


class NewRequest(msgspec.Struct, frozen=True):
    """A request that the runner does not know yet. The step computes its tokens ``start <= i < start + num_tokens``."""

    request_id: str
    start: int
    """Tokens before it are computed: their keys and values are in the request's blocks."""
    num_tokens: int
    num_prompt_tokens: int
    token_ids: list[int]
    """Tokens of the prompt, and of the part of an answer that a beam extends."""
    block_ids: list[list[int]]
    """KV blocks by pass of the model and column of the cache. With X-LoRA there is a second pass, the scaling pass,
    which computes the same tokens before the first one."""
    params: SamplingParams
    seed: int
    """Seed of its random numbers."""
    max_len: int
    """Most tokens of prompt and answer together."""
    end_token_ids: list[int]
    images: tuple[ImagePlacement, ...] = ()
    cross_key: bytes | None = None
    """Key of the `CrossStates` that it attends to."""
    adapter: bytes = b""
    """Digest of its adapter, which has a slot whenever the request is in a step."""
    thoughts: Thoughts | None = None
    """See `Prompt`."""
    client: str = ""
    """Who sent it, see `EngineRequest`."""
    states: tuple[StateStep, ...] | None = None
    """By pass of the model. None: the model has no states."""
    task: Task = GENERATE


class CachedRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that the runner knows. The step computes its tokens ``start <= i < start + num_tokens``.

    Tokens that the runner does not know are drafts.
    """

    request_id: str
    start: int
    num_tokens: int
    new_block_ids: BlockIds = ()
    """KV blocks to append to its block tables."""
    resumed: bool = False
    """It was preempted; `new_block_ids` are its whole block tables."""
    states: tuple[StateStep, ...] | None = None
    """By pass of the model. None: its states go on in their working slots."""


class SchedulerOutput(msgspec.Struct):
    """One step, in the order in which it is run.

    adapter_loads: adapters that get slots.
    finished_request_ids: requests to drop; a new request of the same step may have the same id. blocks_to_zero,
    block_copies: changes to KV blocks. block_contents: of blocks that were read from disk. state_copies: of slots of
    states. embeddings_to_evict: keys of image embeddings and cross-attention states to drop, and to encode no further.
    embeddings_to_place: by key, embeddings of images that were read from disk. images_to_encode: all of them in one
    call; their pixels come with no other step.
    encodings: of images that take several steps. cross_states: to compute.
    cached_requests, new_requests: the batch; a request is in it at most once. draft_token_ids: by request, draft tokens
    that may follow its newest one; they are the last tokens that are computed of it.
    """

    adapter_loads: list[AdapterLoad] = []
    finished_request_ids: list[str] = []
    blocks_to_zero: list[int] = []
    block_copies: list[BlockCopy] = []
    block_contents: list[Bytes] = []
    state_copies: list[BlockCopy] = []
    embeddings_to_evict: list[bytes] = []
    embeddings_to_place: dict[bytes, Bytes] = {}
    images_to_encode: list[ImageInput] = []
    encodings: list[ImageEncoding] = []
    cross_states: list[CrossStates] = []
    cached_requests: list[CachedRequest] = []
    new_requests: list[NewRequest] = []
    draft_token_ids: dict[str, list[int]] = {}

    def append(self, request: CachedRequest | NewRequest) -> None:
        """Add a request to the batch."""
        if isinstance(request, CachedRequest):
            self.cached_requests.append(request)
        else:
            self.new_requests.append(request)

    @property
    def requests(self) -> list[CachedRequest | NewRequest]:
        """The whole batch."""
        return [*self.cached_requests, *self.new_requests]

    @property
    def has_work(self) -> bool:
        """Whether there is anything to run. Evictions alone are not: they free memory for images of the same step."""
        return self.makes_progress or bool(self.blocks_to_zero or self.block_copies or self.state_copies)

    @property
    def makes_progress(self) -> bool:
        """True if it computes tokens, or brings images or states. Copies of blocks bring no request closer to its
        end."""
        batch = self.cached_requests or self.new_requests
        images = self.images_to_encode or self.encodings or self.embeddings_to_place
        return bool(batch or images or self.cross_states)

    @property
    def encoded_keys(self) -> list[bytes]:
        """Of the images that the step works on."""
        return [image.key for image in self.images_to_encode] + [one.key for one in self.encodings]


class RequestFailure(msgspec.Struct, frozen=True):
    """Why a request has no next token.

    kind: "not_finite": its logits hold a NaN, or nothing but minus infinity. "grammar": no token fits its grammar, for
    the reason in `message`. "out_of_memory": the device had too little for it.
    """

    kind: Literal["not_finite", "no_token", "grammar", "out_of_memory"]
    message: str = ""


class RunTimings(msgspec.Struct, frozen=True):
    """Seconds that a step spent in each part of the runner.

    products: multiplications of the vision tower.
    """

    transfer: float = 0.0
    build: float = 0.0
    vision: float = 0.0
    model: float = 0.0
    sample: float = 0.0
    products: int = 0


class ModelRunnerOutput(msgspec.Struct):
    """The output of a step, by request.

    token_ids: for each request whose newest token was computed, the sampled tokens: accepted drafts, and one more;
    fewer if the answer ended. An end token is the last one. A request whose grammar is slow has its tokens in the
    output of a later step instead. logprobs: one for each token, where they are asked for.
    prompt_logprobs: of the prompt's next tokens, where they are asked for; None for those of images.
    undone: requests of the step whose states may be lost, because another request had too little memory: all of their
    tokens have to be computed again. finish_reasons: of answers that their grammar has finished: "stop" where nothing
    can follow, "length" where the answer was closed because few tokens were left. failures: requests that cannot
    continue. scalings: of each adapter that X-LoRA mixes for a request, its layers' mean, added up over the tokens that
    were computed.
    """

    token_ids: dict[str, list[int]] = {}
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
    finish_reasons: dict[str, Literal["stop", "length"]] = {}
    failures: dict[str, RequestFailure] = {}
    undone: list[str] = []
    scalings: dict[str, list[float]] = {}
    results: dict[str, TaskResult] = {}
    """Results of tasks other than `Generate` whose prompt is computed; `token_ids` has an empty list for them."""
    timings: RunTimings = RunTimings()
