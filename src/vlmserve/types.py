"""Data types that all packages share. They are sent between processes as msgspec messages.

Shapes are written as ``[rows, columns]``; lengths are in tokens unless a name says otherwise.
"""

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
"""Tokens that attend to each other in both directions: of each image, up to the first image's end (prefix-LM), all."""
Pixels = npt.NDArray[np.uint8 | np.float32]

KEY_BYTES = 32
MAX_CACHE_SALT = 256
"""Characters of a cache salt."""


class ImageSize(msgspec.Struct, frozen=True):
    """What a model sees of an image or video, and what that costs.

    width, height: of the image as it came, upright, in pixels. model_width, model_height: of what the model sees of
    it; None: its processor does not say. box: the part of the image that this shows, in pixels of the image as it
    came: left, top, right and bottom; what lies beyond it is padding. None: its processor does not say. tokens: of the
    prompt that it takes. frames: that a video has; None for images.
    """

    width: int
    height: int
    model_width: int | None
    model_height: int | None
    box: tuple[float, float, float, float] | None
    tokens: int
    frames: int | None = None


class Canvas(msgspec.Struct, frozen=True):
    """How the pieces of an image lie over each other. Sizes are rows and columns of embeddings."""

    whole: tuple[int, int]
    """Size of the piece that shows the whole image."""
    slices: tuple[int, int] = (0, 0)
    """Rows and columns of slices; 0: the image is not cut."""
    piece: tuple[int, int] = (0, 0)
    """Size of a slice."""

    @property
    def size(self) -> tuple[int, int]:
        """Size of all slices together, or of the whole image."""
        if not self.slices[0]:
            return self.whole
        return self.slices[0] * self.piece[0], self.slices[1] * self.piece[1]


class ImageInput(msgspec.Struct, frozen=True, eq=False):
    """One image or video, ready for a vision tower.

    key: 32-byte digest of the file's bytes, of the preprocessing that made `pixels`, and of the request's cache salt.
    pixels: ``[tiles or frames, channels, height, width]``, shared between requests, so never written to. levels: what
    becomes of them, which are uint8; None: they are normalized float32.
    num_tokens: how many tokens it takes in a prompt: a placeholder for each embedding that the tower returns, and text.
    grid: frames, rows and columns of its embeddings, or a canvas, where positions count them; None: they count tokens.
    frame_step: positions from one frame of the grid to the next, each rounded down.
    tiling: how its tiles lie, or what else the tower must know. text: the tokens that are text, each with its place
    among all of the image's, in order. end_id: the token that belongs to the image wherever it follows it; None: none.
    has_label: it may have tokens before it, by its number among such images. adapter: the digest of the adapter that
    the tower has for it; empty: none.
    size: what the model sees of it; None: nobody asks.
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
        """The same with another token of text at its end."""
        text = (*self.text, (self.num_tokens, token_id))
        return msgspec.structs.replace(self, num_tokens=self.num_tokens + 1, text=text)


class Run(NamedTuple):
    """Placeholders ``first <= i < last`` that take an image's embeddings, from its row `offset` on."""

    first: int
    last: int
    offset: int


class ImagePlacement(msgspec.Struct, frozen=True):
    """Where an image lies in a prompt, without its pixels: tokens ``start <= i < end`` of `Prompt.token_ids`.

    The other fields are those of its `ImageInput`.
    """

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
        """The image's placeholders among ``start <= i < end``, without the text between them."""
        first, last = max(self.start, start), min(self.end, end)
        passed = bisect_left(self.text, (first - self.start,))
        while first < last:
            stop = min(last, self.start + self.text[passed][0]) if passed < len(self.text) else last
            if first < stop:
                yield Run(first, stop, first - self.start - passed)
            first, passed = stop + 1, passed + 1

    @property
    def shown(self) -> tuple[int, int]:
        """From its first placeholder to behind the last, without the text around them."""
        runs = list(self.runs(self.start, self.end))
        return runs[0].first, runs[-1].last


class ImageSpan(msgspec.Struct, frozen=True, eq=False):
    """An image in a prompt: tokens ``start <= i < end`` of `Prompt.token_ids` are its."""

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
    """What a decoder attends to by cross attention: an image, or a text that an encoder reads along with the image.

    token_ids: of that text; none for the image alone.
    """

    image: ImageInput
    token_ids: list[int] = []

    @property
    def num_states(self) -> int:
        """How many states the decoder attends to: one for each token of the text, or each of the image's features."""
        return len(self.token_ids) or self.image.num_embeddings


class Thoughts(msgspec.Struct, frozen=True):
    """What an answer may think before it says anything: the tokens between two markers.

    start_id, end_id: the markers. begun: whether an answer begins inside of thoughts; if it does not, it has some only
    if it begins with `start_id`. blank_ids: tokens of space that may stand before `start_id`.
    """

    start_id: int
    end_id: int
    begun: bool = False
    blank_ids: tuple[int, ...] = ()


class Prompt(msgspec.Struct, frozen=True, eq=False):
    """What a model reads: token ids with placeholders expanded, and the images behind them in prompt order.

    cross: what its decoder attends to by cross attention, if it does. thoughts: that its answers may begin with; None:
    they have none. num_shared: leading tokens that a `Prefill` has computed; 0: none, or it is not known.
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
        """The images, in order. One that the decoder attends to by cross attention is the last."""
        return [span.image for span in self.images] + ([] if self.cross is None else [self.cross.image])

    @property
    def num_image_tokens(self) -> int:
        return sum(span.image.num_tokens for span in self.images)

    @property
    def image_sizes(self) -> list[ImageSize]:
        """What the model sees of the images, in order. One that it sees by cross attention takes no tokens."""
        sizes = [span.image.size for span in self.images]
        if self.cross is not None and self.cross.image.size is not None:
            sizes.append(msgspec.structs.replace(self.cross.image.size, tokens=0))
        return [size for size in sizes if size is not None]


class BeamSearch(msgspec.Struct, frozen=True):
    """What is searched for. width: beams that go on. length_penalty: scores are log probabilities divided by the
    length to the power of it. early_stopping: end as soon as `width` answers have ended."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False

    def end_token_ids(self, params: SamplingParams, model_end_token_ids: Iterable[int]) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset() if params.ignore_eos else frozenset([*model_end_token_ids, *params.stop_token_ids])

    def num_choices(self, num_end_tokens: int) -> int:
        """How many choices each beam needs, so that enough are left when all of the best end."""
        return max(2, 1 + num_end_tokens) * self.width


class BeamAnswer(msgspec.Struct, frozen=True):
    """One of the answers that a beam search found. token_ids: without the end token that finished it."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_token_id: int | None = None


class EngineRequest(msgspec.Struct, frozen=True, eq=False):
    """One prompt and what is wanted of it. `request_id` is unique among the engine's unfinished requests.

    cache_salt: requests share cached prefixes only with those of the same salt, so that one tenant cannot find out
    from timings what another has sent. The images' keys hold it already. beams: search for answers instead of sampling
    one; of `params`, the tokens that end an answer and its least and largest length count. adapter: the name of the
    adapter that answers; empty: the model itself. priority: those with a larger number wait for those with a smaller
    one, and give way to them.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams = SamplingParams()
    cache_salt: str = ""
    beams: BeamSearch | None = None
    adapter: str = ""
    priority: int = 0
    client: str = ""
    """Who sent it. Clients share the time for grammars fairly."""
    task: Task = GENERATE


class RequestTimings(msgspec.Struct, frozen=True):
    """Where a request's seconds went.

    queue: until it first ran. vision: in steps' encoding of images that it needed. prefill: from when it first ran
    to its first token, vision included. decode: from its first token to its end; None while it goes on.
    arrived: when the engine got it, as Unix time. before_vision: from then until a step first encoded an image for it.
    """

    queue: float
    vision: float
    prefill: float
    decode: float | None
    arrived: float = 0.0
    before_vision: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """How likely a token was, by the model's own logits: before bias, penalties, temperature and filters.

    rank: 1 for the likeliest token. top: ids and log probabilities of the likeliest tokens, in order, as many as were
    asked for; the token itself may be among them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class EngineOutput(msgspec.Struct, frozen=True):
    """What one step brought for one request.

    token_ids: the new tokens, without the end token that finished it.
    logprobs: one for each of `token_ids`, if they were asked for. prompt_logprobs: with the first output, if they were
    asked for, one for each token of the prompt; None for the first, which nothing comes before, and for images.
    finish_reason: None while it goes on. stop_token_id: the end token, if one finished it.
    error: what went wrong, with finish_reason "error". cached_tokens: prompt tokens that did not have to be computed
    when the request first ran. images_encoded: images that went through the vision tower for its sake so far.
    timings: with the first token, for those who abort it before its end, and with the last output.
    error_param: the field of the request whose fault an error is, if it is one's. beams: what a beam search found, the
    best first; a search has one output, whose other fields are those of the best answer. stop_logprobs: of the end
    token, if logprobs were asked for.
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
    """Draft tokens so far that are part of the answer; `rejected_drafts` were checked and are not."""
    rejected_drafts: int = 0
    result: TaskResult | None = None
    """The only output of a task other than `Generate` has it, with finish_reason "stop"."""


class AdapterInfo(msgspec.Struct, frozen=True):
    """An adapter that is served. path: of its folder. digest: of its content, in hex. vision: whether it changes the
    embeddings of images. num_bytes: that it takes in memory. mixes: the adapters that X-LoRA mixes, by name."""

    name: str
    path: str
    digest: str
    rank: int
    num_bytes: int
    vision: bool = False
    mixes: list[str] = []


class ModelInfo(msgspec.Struct, frozen=True):
    """A loaded model, for frontend and server. max_model_len: tokens of prompt and answer together."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    num_parameters: int
    max_prompt_len: int
    """The longest prompt that can ever run: what the context and the KV cache allow."""
    kv_cache_bytes: int
    supports_images: bool
    kv_cache_tokens: int = 0
    """Tokens that the KV cache holds."""
    weight_bytes: int = 0
    end_token_ids: list[int] = []
    gpu_uuid: str | None = None
    """Which GPU it runs on, as NVML knows it."""
    image_token_bytes: int = 0
    """What an embedding of an image takes in the encoder cache."""
    tensor_parallel_size: int = 1
    embedding_size: int = 0
    """Elements of an embedding of a prompt."""
    image_cost: ImageCost | None = None
    """Time of the vision tower on this machine; None: all images have one size, or it is not known."""


class EngineStats(DiskStats, frozen=True):
    """A snapshot of an engine, cheap enough to take after every step."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed since start, those computed again after a preemption counted again."""
    generation_tokens: int = 0
    preemptions: int = 0
    images_encoded: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    """Spent in steps, all of which run something."""
    vision_seconds: float = 0.0
    """Those of them in which images were encoded."""
    images_in_progress: int = 0
    image_seconds_left: float = 0.0
    """Expected time of the vision tower for the images in progress."""
    prefix_queried_tokens: int = 0
    """Prompt tokens of requests that have started."""
    prefix_cached_tokens: int = 0
    """Those of them that were found in the prefix cache."""
    kv_blocks_cached: int = 0
    """Blocks whose content can be found again, those of running requests included."""
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
    """Blocks copied to host memory when they were evicted."""
    blocks_loaded: int = 0
    encoder_queries: int = 0
    """Images whose embeddings a request needed."""
    encoder_hits: int = 0
    """The part of them that the encoder cache has or is about to have."""
    encoder_cache_bytes: int = 0
    encoder_cache_used_bytes: int = 0
    encoder_cache_pinned: int = 0
    """Images whose embeddings a running request needs."""
    adapters_served: int = 0
    adapters_loaded: int = 0
    adapters_active: int = 0
    """Those that running requests have."""
    adapter_bytes: int = 0
    """What those in memory take."""
    adapter_loads: int = 0
    adapter_evictions: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0


MAX_MAP_CELLS = 1024
"""Of a map of the KV cache."""


class BlockMap(msgspec.Struct, frozen=True):
    """The KV cache's blocks in the order of their ids, `blocks_per_cell` of them together where there are many.

    Of each cell, held: blocks that requests hold. cached: those that nobody holds and that can be found again; all
    others are free and empty. holders: how many requests hold the block that most of them hold.
    """

    num_blocks: int
    blocks_per_cell: int
    held: list[int]
    cached: list[int]
    holders: list[int]


RequestState = Literal["running", "waiting", "preempted"]


class RequestSnapshot(msgspec.Struct, frozen=True):
    """Where an unfinished request stands. Numbers only: nothing of what it asks or answers.

    state: "preempted" waits as well, after it has run. num_tokens: prompt and answer so far; num_computed_tokens:
    leading ones of them whose keys and values are in `num_blocks` KV blocks, shared ones included.
    num_cached_tokens: as `EngineOutput.cached_tokens`. images_in_progress: images that take several steps of the tower.
    adapter_shares: of each adapter that X-LoRA mixes for it, its share of all scalings so far; none without.
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
    """What an engine holds between two steps. requests: the unfinished ones, running ones first."""

    stats: EngineStats
    requests: list[RequestSnapshot]
