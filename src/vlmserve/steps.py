"""Immutable messages between scheduler and runner, with changes of requests only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vlmserve.tasks import GENERATE, Task, TaskResult
from vlmserve.types import Bidirectional, ImageInput, ImagePlacement, SamplingParams, Thoughts, TokenLogprobs

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""Content of a cache entry, ``[bytes]``."""
BlockIds: TypeAlias = tuple[tuple[int, ...], ...]
"""KV blocks by pass of the model and column of the cache (see `CacheLayout`). Empty: no new blocks."""


def bidirectional_spans(
    images: Sequence[ImagePlacement], num_tokens: int, bidirectional: Bidirectional | None
) -> tuple[tuple[int, int], ...]:
    """Spans ``first <= i < last`` of tokens that attend to each other."""
    if bidirectional == "images":
        return tuple(image.shown for image in images)
    if bidirectional == "prefix":
        return tuple((0, image.end) for image in images[:1])
    return () if bidirectional is None else ((0, num_tokens),)


class BlockCopy(NamedTuple):
    """A KV block or state slot to save, load back, or copy on the device.

    fill: from disk; `source` is an index in `SchedulerOutput.block_contents` or `state_contents`.
    """

    kind: Literal["save", "load", "copy", "fill"]
    source: int
    target: int


class DiskEntry(NamedTuple):
    key: bytes
    content: Bytes
    """This rank's. A step leaves the contents of other ranks out."""


class DiskLoad(msgspec.Struct, frozen=True):
    """Shards of blocks and states, which each rank but 0 begins to read. Rank 0 has read its own."""

    number: int
    keys: list[bytes]


class DiskStores(msgspec.Struct):
    """Blocks and states to store on disk, and keys to remove from it."""

    blocks: list[tuple[int, bytes]] = []
    """KV blocks with their keys."""
    states: list[tuple[int, bytes]] = []
    """State slots with their keys."""
    forgotten: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self.blocks or self.states or self.forgotten)


class StateStep(NamedTuple):
    """State slots that one pass reads and writes for a request."""

    slot: int
    """Working slot, for the state after the step's last token."""
    source: int
    """Slot of the state before the step, or `NO_SLOT`."""
    checkpoints: tuple[tuple[int, int], ...] = ()
    """Pairs of a sequence length and the slot for the state at that length. With the working slot, it only divides the
    computation.
    """
    draft_place: int = 0
    """Place that keeps drafts, if the step has some or the last one had."""
    num_accepted: int = 0
    """Kept drafts of the last step that became tokens. They are before `start`, but not in the state yet."""


class CrossStates(msgspec.Struct, frozen=True):
    key: bytes
    """Cache key."""
    image_key: bytes
    """Key of the image's features, which are in memory."""
    token_ids: list[int]
    """Text to encode with the image; empty: the image alone."""


class AdapterLoad(NamedTuple):
    slot: int
    digest: bytes
    """Identifies the adapter."""


class ImageEncoding(msgspec.Struct, frozen=True):
    key: bytes
    products: int | None
    """MACs in this step; None: all remaining ones, so the step's tokens find the embeddings."""
    image: ImageInput | None = None
    """Only in the first of these steps."""


class NewRequest(msgspec.Struct, frozen=True):
    """A request new to the runner; compute tokens ``start <= i < start + num_tokens``."""

    request_id: str
    start: int
    """Earlier tokens are computed: their keys and values are in the request's blocks."""
    num_tokens: int
    num_prompt_tokens: int
    token_ids: list[int]
    """Tokens of the prompt, and of the answer so far in a beam search."""
    block_ids: list[list[int]]
    """KV blocks by pass of the model and column of the cache. X-LoRA's second pass, the scaling pass, computes the same
    tokens before the first.
    """
    params: SamplingParams
    seed: int
    """Seed of its random numbers."""
    max_len: int
    """Maximum tokens of prompt and answer."""
    end_token_ids: list[int]
    images: tuple[ImagePlacement, ...] = ()
    cross_key: bytes | None = None
    """Key of its `CrossStates`."""
    adapter: bytes = b""
    """Digest of its adapter, which has a slot in every step of the request."""
    thoughts: Thoughts | None = None
    """See `Prompt`."""
    client: str = ""
    """Its client, see `EngineRequest`."""
    states: tuple[StateStep, ...] | None = None
    """By pass of the model; None: the model has no states."""
    task: Task = GENERATE


class CachedRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A known request; compute tokens ``start <= i < start + num_tokens``. Unknown ones are drafts."""

    request_id: str
    start: int
    num_tokens: int
    new_block_ids: BlockIds = ()
    """KV blocks to append to its block tables."""
    resumed: bool = False
    """It was preempted; `new_block_ids` are complete block tables."""
    states: tuple[StateStep, ...] | None = None
    """By pass of the model; None: the states stay in their working slots."""


class SchedulerOutput(msgspec.Struct):
    """One step. The runner applies fields in this order."""

    adapter_loads: list[AdapterLoad] = []
    """Adapters to load into slots."""
    finished_request_ids: list[str] = []
    """Requests to drop; a new request of the step may reuse an id."""
    blocks_to_zero: list[int] = []
    block_copies: list[BlockCopy] = []
    block_contents: list[DiskEntry] = []
    """Blocks that were read from disk."""
    state_copies: list[BlockCopy] = []
    state_contents: list[DiskEntry] = []
    """States that were read from disk."""
    embeddings_to_evict: list[bytes] = []
    """Keys of image embeddings and cross-attention states to drop and to encode no further."""
    embeddings_to_place: dict[bytes, Bytes] = {}
    """By key, image embeddings that were read from disk."""
    images_to_encode: list[ImageInput] = []
    """Images to encode in one call. No other step has their pixels."""
    encodings: list[ImageEncoding] = []
    """Images that take several steps."""
    cross_states: list[CrossStates] = []
    cached_requests: list[CachedRequest] = []
    new_requests: list[NewRequest] = []
    """With `cached_requests`, the batch. A request appears at most once."""
    draft_token_ids: dict[str, list[int]] = {}
    """By request, draft tokens after its newest token; they are its last computed tokens."""
    num_predicted: dict[str, int] = {}
    """By request that runs through the model's own layer, how many drafts it makes after the step's tokens."""
    disk_loads: list[DiskLoad] = []
    """Loads to begin."""
    disk_loads_to_drop: list[int] = []
    """Numbers of loads that later steps do not need."""
    awaits_disk_loads: bool = False
    """The output tells which loads ended."""

    def append(self, request: CachedRequest | NewRequest) -> None:
        if isinstance(request, CachedRequest):
            self.cached_requests.append(request)
        else:
            self.new_requests.append(request)

    @property
    def requests(self) -> list[CachedRequest | NewRequest]:
        return [*self.cached_requests, *self.new_requests]

    @property
    def has_work(self) -> bool:
        """Evictions alone only make room for the step's images."""
        copies = self.blocks_to_zero or self.block_copies or self.state_copies
        return self.makes_progress or self.awaits_disk_loads or bool(copies)

    @property
    def makes_progress(self) -> bool:
        """True if the step computes tokens, images or states."""
        batch = self.cached_requests or self.new_requests
        images = self.images_to_encode or self.encodings or self.embeddings_to_place
        return bool(batch or images or self.cross_states)

    @property
    def encoded_keys(self) -> list[bytes]:
        return [image.key for image in self.images_to_encode] + [one.key for one in self.encodings]


class RequestFailure(msgspec.Struct, frozen=True):
    """Why a request has no next token.

    kind: "not_finite": logits with NaN or only minus infinity. "grammar": see `message`. "out_of_memory": of the
    device.
    """

    kind: Literal["not_finite", "no_token", "grammar", "out_of_memory"]
    message: str = ""


class RunTimings(msgspec.Struct, frozen=True):
    """Seconds of a step's parts. products: MACs of the vision tower."""

    transfer: float = 0.0
    build: float = 0.0
    vision: float = 0.0
    model: float = 0.0
    sample: float = 0.0
    products: int = 0


class ModelRunnerOutput(msgspec.Struct):
    token_ids: dict[str, list[int]] = {}
    """For requests whose newest token was computed: accepted drafts and one more token, fewer if the answer ended; an
    end token is the last. A slow grammar's tokens come in a later step's output.
    """
    logprobs: dict[str, list[TokenLogprobs]] = {}
    """One for each token, if requested."""
    forced: dict[str, list[int]] = {}
    """Tokens that probably follow, because a grammar allows no other text. Empty unless the engine drafts."""
    predicted: dict[str, list[int]] = {}
    """Drafts after the new tokens, see `SchedulerOutput.num_predicted`; perhaps fewer."""
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
    """For the prompt's next tokens, if requested; None for images."""
    finish_reasons: dict[str, Literal["stop", "length"]] = {}
    """For answers that their grammar finished: "stop" if nothing can follow, "length" if the token limit forced the
    end.
    """
    failures: dict[str, RequestFailure] = {}
    """Requests that cannot continue."""
    undone: list[str] = []
    """Requests whose states may be lost because another request ran out of memory; recompute all their tokens."""
    scalings: dict[str, list[float]] = {}
    """For X-LoRA requests: scalings of each adapter, mean over layers, sum over computed tokens."""
    results: dict[str, TaskResult] = {}
    """Results of finished tasks other than `Generate`; `token_ids` has an empty list for them."""
    disk_loads: dict[int, set[bytes]] = {}
    """By number of a load that ended on every rank, the keys that every rank has read."""
    timings: RunTimings = RunTimings()
