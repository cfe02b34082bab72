"""Messages that all packages share. Shapes: ``[rows, columns]``; lengths: tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from vlmserve.disk_stats import DiskStats
from vlmserve.image_cost import ImageCost
from vlmserve.levels import Levels
from vlmserve.sampling_params import MAX_BIASES as MAX_BIASES
from vlmserve.sampling_params import MAX_SEED as MAX_SEED
from vlmserve.sampling_params import Grammar as Grammar
from vlmserve.sampling_params import GrammarKind as GrammarKind
from vlmserve.sampling_params import SamplingParams as SamplingParams
from vlmserve.tasks import GENERATE, Task, TaskResult
from vlmserve.tower_inputs import FurtherInputs as FurtherInputs
from vlmserve.tower_inputs import NamedArray as NamedArray
from vlmserve.tower_inputs import Pieces as Pieces
from vlmserve.tower_inputs import SquareGrids as SquareGrids
from vlmserve.tower_inputs import Tiling as Tiling
from vlmserve.tower_inputs import TowerInputs as TowerInputs

FinishReason = Literal["stop", "length", "abort", "error"]
MediaKind = Literal["image", "video", "document"]
Bidirectional = Literal["images", "prefix", "prompt"]
"""Tokens that attend in both directions: each image's, all up to the first image's end (prefix-LM), the whole
prompt.
"""
Pixels = npt.NDArray[np.uint8 | np.float32]

KEY_BYTES = 32
MAX_CACHE_SALT = 256
"""Maximum characters."""


class ImageSize(msgspec.Struct, frozen=True):
    """The model's view of an image or video, and its cost.

    width, height: pixels of the upright original. model_width, model_height: pixels that the model sees. box: the
    part that it sees, in original pixels (left, top, right, bottom), padding included. None: unknown; frames: no
    video.
    """

    width: int
    height: int
    model_width: int | None
    model_height: int | None
    box: tuple[float, float, float, float] | None
    tokens: int
    frames: int | None = None


class Canvas(msgspec.Struct, frozen=True):
    """Overlapping pieces of an image. Sizes: rows and columns of embeddings."""

    whole: tuple[int, int]
    """Size of the piece that shows the whole image."""
    slices: tuple[int, int] = (0, 0)
    """Rows and columns of slices; 0: the image is not cut."""
    piece: tuple[int, int] = (0, 0)
    """Size of a slice."""

    @property
    def size(self) -> tuple[int, int]:
        if not self.slices[0]:
            return self.whole
        return self.slices[0] * self.piece[0], self.slices[1] * self.piece[1]


class ImageInput(msgspec.Struct, frozen=True, eq=False):
    """One image or video, ready for a vision tower.

    key: 32-byte digest of file, preprocessing and cache salt. pixels: ``[tiles or frames, channels, height, width]``,
    read-only. levels: normalization of uint8 pixels. num_tokens: one per embedding, plus text. grid: frames, rows and
    columns of embeddings; None: positions count tokens. frame_step: positions between frames, each rounded down.
    text: (index among the image's tokens, token) in order. end_id: belongs to the image if it follows. has_label: a
    number may precede it. adapter: digest of the tower's adapter.
    """

    key: bytes
    pixels: Pixels
    num_tokens: int
    grid: tuple[int, int, int] | Canvas | None = None
    frame_step: float = 1.0
    tiling: TowerInputs | None = None
    text: tuple[tuple[int, int], ...] = ()
    end_id: int | None = None
    has_label: bool = True
    adapter: bytes = b""
    size: ImageSize | None = None
    levels: Levels | None = None

    @property
    def num_embeddings(self) -> int:
        return self.num_tokens - len(self.text)

    def followed_by(self, token_id: int) -> ImageInput:
        text = (*self.text, (self.num_tokens, token_id))
        return msgspec.structs.replace(self, num_tokens=self.num_tokens + 1, text=text)


class Run(NamedTuple):
    """Placeholders ``first <= i < last``, with embeddings from row `offset`."""

    first: int
    last: int
    offset: int


class ImagePlacement(msgspec.Struct, frozen=True):
    """An `ImageInput` without pixels, at tokens ``start <= i < end``."""

    key: bytes
    start: int
    num_tokens: int
    grid: tuple[int, int, int] | Canvas | None = None
    frame_step: float = 1.0
    text: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def runs(self, start: int, end: int) -> Iterator[Run]:
        first, last = max(self.start, start), min(self.end, end)
        passed = bisect_left(self.text, (first - self.start,))
        while first < last:
            stop = min(last, self.start + self.text[passed][0]) if passed < len(self.text) else last
            if first < stop:
                yield Run(first, stop, first - self.start - passed)
            first, passed = stop + 1, passed + 1

    @property
    def shown(self) -> tuple[int, int]:
        """From the first placeholder to the last."""
        runs = list(self.runs(self.start, self.end))
        return runs[0].first, runs[-1].last


class ImageSpan(msgspec.Struct, frozen=True, eq=False):
    """An image at tokens ``start <= i < end``."""

    image: ImageInput
    start: int

    @property
    def end(self) -> int:
        return self.start + self.image.num_tokens

    @property
    def placement(self) -> ImagePlacement:
        image = self.image
        return ImagePlacement(image.key, self.start, image.num_tokens, image.grid, image.frame_step, image.text)


class CrossInput(msgspec.Struct, frozen=True, eq=False):
    """Input of cross-attention: an image, or a text encoded with it.

    token_ids: the text, if any.
    """

    image: ImageInput
    token_ids: list[int] = []

    @property
    def num_states(self) -> int:
        """One state per text token, or per image feature."""
        return len(self.token_ids) or self.image.num_embeddings


class Thoughts(msgspec.Struct, frozen=True):
    """Marker tokens of reasoning before an answer.

    begun: answers start inside it. blank_ids: whitespace that may precede `start_id`.
    """

    start_id: int
    end_id: int
    begun: bool = False
    blank_ids: tuple[int, ...] = ()


class Prompt(msgspec.Struct, frozen=True, eq=False):
    """Token ids with expanded placeholders, and their images in order.

    num_shared: leading tokens that a `Prefill` computed; 0: unknown.
    """

    token_ids: list[int]
    images: tuple[ImageSpan, ...] = ()
    cross: CrossInput | None = None
    thoughts: Thoughts | None = None
    num_shared: int = 0
    prediction: list[int] = []
    """Tokens that an answer probably repeats."""

    @property
    def num_images(self) -> int:
        return len(self.images) + (self.cross is not None)

    @property
    def image_inputs(self) -> list[ImageInput]:
        """In order; the image of cross-attention last."""
        return [span.image for span in self.images] + ([] if self.cross is None else [self.cross.image])

    @property
    def num_image_tokens(self) -> int:
        return sum(span.image.num_tokens for span in self.images)

    @property
    def image_sizes(self) -> list[ImageSize]:
        """In order. An image of cross-attention takes no tokens."""
        sizes = [span.image.size for span in self.images]
        if self.cross is not None and self.cross.image.size is not None:
            sizes.append(msgspec.structs.replace(self.cross.image.size, tokens=0))
        return [size for size in sizes if size is not None]


class BeamSearch(msgspec.Struct, frozen=True):
    """width: beams. length_penalty: divides log probabilities by ``length ** length_penalty``.

    early_stopping: end once `width` answers have ended.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False

    def end_token_ids(self, params: SamplingParams, model_end_token_ids: Iterable[int]) -> frozenset[int]:
        return frozenset() if params.ignore_eos else frozenset([*model_end_token_ids, *params.stop_token_ids])

    def num_choices(self, num_end_tokens: int) -> int:
        """Choices per beam: enough if all the best ones end."""
        return max(2, 1 + num_end_tokens) * self.width


class BeamAnswer(msgspec.Struct, frozen=True):
    token_ids: list[int]
    finish_reason: FinishReason
    stop_token_id: int | None = None


class EngineRequest(msgspec.Struct, frozen=True, eq=False):
    """A prompt and its task. `request_id` is unique among unfinished requests.

    cache_salt: only requests of equal salt share cached prefixes, so timing reveals nothing about others. beams:
    `params` sets only end tokens and length. adapter: name; empty: the model itself. priority: lower runs first and
    preempts higher.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams = SamplingParams()
    cache_salt: str = ""
    beams: BeamSearch | None = None
    adapter: str = ""
    priority: int = 0
    client: str = ""
    """The sender. Clients share the time for grammars fairly."""
    task: Task = GENERATE


class RequestTimings(msgspec.Struct, frozen=True):
    """Seconds of a request.

    queue: until it first ran. prefill: from then to the first token, including vision. decode: first token to end;
    None while running. arrived: Unix time. before_vision: from arrival to its first image encoding.
    """

    queue: float
    vision: float
    prefill: float
    decode: float | None
    arrived: float = 0.0
    before_vision: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """By unmodified logits: before bias, penalties, temperature and filters.

    rank: 1 for the most likely. top: ids and log probabilities of the most likely tokens; may include the token.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Missed(msgspec.Struct, frozen=True):
    """Prompt tokens that the prefix cache lacked, by reason."""

    never_seen: int = 0
    evicted: int = 0
    """Their blocks or checkpoint were evicted."""
    no_checkpoint: int = 0
    """Their blocks are cached, but no state is."""
    not_cacheable: int = 0
    """Computed again, cached or not: the last token, or all for prompt logprobs and without prefix caching."""
    seconds_since_eviction: float | None = None
    """Time since the first evicted tokens were evicted."""

    def __add__(self, other: Missed) -> Missed:
        return Missed(
            self.never_seen + other.never_seen,
            self.evicted + other.evicted,
            self.no_checkpoint + other.no_checkpoint,
            self.not_cacheable + other.not_cacheable,
            self.seconds_since_eviction if other.seconds_since_eviction is None else other.seconds_since_eviction,
        )


class EngineOutput(msgspec.Struct, frozen=True):
    """One step's output for one request.

    token_ids: new, without an end token. prompt_logprobs: with the first output; None for the first token and images.
    finish_reason: None while running. error: the reason of finish_reason "error". cached_tokens: found at the first
    run. images_encoded: so far. timings: with the first token (for clients that abort) and last output. beams:
    answers, best first, in the only output; other fields describe the best.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    cached_tokens: int = 0
    images_encoded: int = 0
    timings: RequestTimings | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error_param: str | None = None
    beams: list[BeamAnswer] | None = None
    stop_logprobs: TokenLogprobs | None = None
    accepted_drafts: int = 0
    """Draft tokens in the answer so far; `rejected_drafts` failed verification."""
    rejected_drafts: int = 0
    result: TaskResult | None = None
    """The result of a task other than `Generate`, in its only output, with finish_reason "stop"."""
    missed: Missed | None = None
    """In the first output."""


class AdapterInfo(msgspec.Struct, frozen=True):
    """digest: of its content, in hex. vision: changes image embeddings. mixes: names for X-LoRA."""

    name: str
    path: str
    digest: str
    rank: int
    num_bytes: int
    vision: bool = False
    mixes: list[str] = []


class ModelInfo(msgspec.Struct, frozen=True):
    """A loaded model. max_model_len: tokens of prompt and answer."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    num_parameters: int
    max_prompt_len: int
    """Maximum prompt tokens that context and KV cache allow."""
    kv_cache_bytes: int
    supports_images: bool
    kv_cache_tokens: int = 0
    """Capacity of the KV cache in tokens."""
    weight_bytes: int = 0
    end_token_ids: list[int] = []
    gpu_uuid: str | None = None
    """NVML's name of its GPU."""
    image_token_bytes: int = 0
    """Bytes of an image embedding in the encoder cache."""
    tensor_parallel_size: int = 1
    embedding_size: int = 0
    """Elements of a prompt's embedding."""
    image_cost: ImageCost | None = None
    """Time of the vision tower on this machine; None: unknown, or all images have one size."""


class EngineStats(DiskStats, frozen=True):
    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    prompt_tokens: int = 0
    """Computed since start; recomputation after preemption counts again."""
    generation_tokens: int = 0
    preemptions: int = 0
    images_encoded: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    vision_seconds: float = 0.0
    """Time of steps that encoded images."""
    images_in_progress: int = 0
    image_seconds_left: float = 0.0
    """Expected time to encode the images in progress."""
    prefix_queried_tokens: int = 0
    """Prompt tokens of started requests."""
    prefix_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    prefix_never_seen_tokens: int = 0
    prefix_evicted_tokens: int = 0
    """Prompt tokens whose blocks or checkpoint were evicted."""
    prefix_unsaved_tokens: int = 0
    """Prompt tokens whose blocks are cached without a checkpoint of a state."""
    kv_blocks_cached: int = 0
    """Blocks that can be found again, including blocks of running requests."""
    kv_evictions: int = 0
    state_slots_total: int = 0
    state_slots_used: int = 0
    state_checkpoints: int = 0
    state_evictions: int = 0
    host_states_total: int = 0
    host_states_used: int = 0
    states_offloaded: int = 0
    states_loaded: int = 0
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    blocks_offloaded: int = 0
    """Blocks copied to host memory on eviction."""
    blocks_loaded: int = 0
    encoder_queries: int = 0
    """Images whose embeddings a request needed."""
    encoder_hits: int = 0
    """Images found in the encoder cache, or being encoded."""
    encoder_cache_bytes: int = 0
    encoder_cache_used_bytes: int = 0
    encoder_cache_pinned: int = 0
    """Images that running requests need."""
    adapters_served: int = 0
    adapters_loaded: int = 0
    adapters_active: int = 0
    """Adapters of running requests."""
    adapter_bytes: int = 0
    """Bytes of the loaded adapters."""
    adapter_loads: int = 0
    adapter_evictions: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0

    @property
    def kv_usage(self) -> float:
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0


MAX_MAP_CELLS = 1024
"""Maximum cells of a `BlockMap`."""


class BlockMap(msgspec.Struct, frozen=True):
    """The KV cache's blocks by id, in cells of `blocks_per_cell`.

    held: by requests. cached: unheld but reusable; others are free. holders: of the cell's most shared block.
    """

    num_blocks: int
    blocks_per_cell: int
    held: list[int]
    cached: list[int]
    holders: list[int]


RequestState = Literal["running", "waiting", "preempted"]


class RequestSnapshot(msgspec.Struct, frozen=True):
    """Progress of an unfinished request, without content.

    num_tokens: prompt and answer. num_computed_tokens: leading tokens in `num_blocks` KV blocks, shared ones
    included. images_in_progress: need several steps. adapter_shares: mean fraction of each X-LoRA adapter.
    """

    request_id: str
    state: RequestState
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_images: int
    num_blocks: int
    images_in_progress: int = 0
    adapter_shares: list[float] = []


class EngineSnapshot(msgspec.Struct, frozen=True):
    stats: EngineStats
    requests: list[RequestSnapshot]
