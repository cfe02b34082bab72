"""One request on its way through the engine."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from vlmserve.cache.keys import block_key, cross_key, looking_root, touched_images
from vlmserve.sampling.adjustment import Adjustment
from vlmserve.types import (
    EngineRequest,
    ImageInput,
    ImageSpan,
    Prompt,
    SeesAhead,
    TokenLogprobs,
    whole_ranges,
)

if TYPE_CHECKING:
    from vlmserve.sampling.grammar import Matcher


class Sequence:
    """Tokens so far, how many of them are in the KV cache, and where.

    token_ids: prompt and answer. num_computed: leading tokens whose keys and values are in `block_table`'s blocks.
    block_table: grows while the sequence keeps its blocks; once they are gone, a new one takes its place.
    first_block: the first block of the table that is held; those before it are behind the attention window.
    num_cached: prompt tokens whose keys and values were there already when it first ran; None before.
    whole_ranges: tokens ``first <= i < last`` that see each other, so that they are computed in one go; in order.
    num_encoded: pictures encoded for its sake. cross, cross_key: what it looks at by cross attention, if anything.
    seed: where this request's random numbers come from. max_len: prompt and answer may not exceed it.
    first_position: where its positions begin, as the model wants it of a prompt of this length.
    max_short_len: with more tokens than that it is computed in another way, all of it; None: there is but one way.
    matcher: where its answer stands in the grammar that it has to obey, if there is one.
    adjustment: what it changes in its logits, if anything. prompt_logprobs: those of the prompt's leading tokens, while
    they are asked for and not yet told; as long as that is so, it reads no cached prefix.
    arrived, started, vision_started, answered: when it was added, first ran, had a picture encoded and had its first
    token, on the clock of `time.perf_counter`, 0 before. arrived_at: when it was added, as Unix time. vision_seconds:
    how long steps encoded pictures that it needed.
    """

    __slots__ = (
        "_long_root_key",
        "_tail",
        "adjustment",
        "answered",
        "arrived",
        "arrived_at",
        "block_keys",
        "block_table",
        "cross",
        "cross_key",
        "end_token_ids",
        "first_block",
        "first_position",
        "image_spans",
        "matcher",
        "max_len",
        "max_short_len",
        "num_cached",
        "num_computed",
        "num_encoded",
        "num_prompt_tokens",
        "params",
        "prompt_logprobs",
        "request_id",
        "seed",
        "started",
        "token_ids",
        "vision_seconds",
        "vision_started",
        "whole_ranges",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        root_key: bytes,
        seed: int,
        max_len: int,
        end_token_ids: frozenset[int],
        max_short_len: int | None = None,
        first_position: int = 0,
        sees_ahead: SeesAhead | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self.request_id = request.request_id
        self.params = request.params
        self.matcher = matcher
        self.seed = seed
        self.token_ids = list(request.prompt.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.image_spans = request.prompt.images
        self.adjustment: Adjustment | None = None
        if self.params.logit_bias or self.params.penalizes:
            self.adjustment = Adjustment(self.params, _without_pictures(request.prompt))
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self.num_computed = 0
        self.num_cached: int | None = None
        self.num_encoded = 0
        self.arrived = self.started = self.vision_started = self.answered = 0.0
        self.arrived_at = self.vision_seconds = 0.0
        self.block_table = array("i")
        self.first_block = 0
        self.first_position = first_position
        self.cross = request.prompt.cross
        self.cross_key: bytes | None = None
        if self.cross is not None:
            self.cross_key = cross_key(self.cross.image.key, self.cross.token_ids)
            root_key = looking_root(root_key, self.cross_key)
        self.whole_ranges = whole_ranges(self.image_spans, self.num_prompt_tokens, sees_ahead)
        self._long_root_key = block_key(root_key, (), ())
        self.max_short_len = max_short_len
        self.block_keys = [self._long_root_key if self.is_long else root_key]
        self._tail = (0, b"")
        own_end = frozenset() if self.params.ignore_eos else end_token_ids
        self.end_token_ids = own_end | frozenset(self.params.stop_token_ids)
        wanted = max_len if self.params.max_tokens is None else self.num_prompt_tokens + self.params.max_tokens
        self.max_len = min(max_len, wanted)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_long(self) -> bool:
        """Whether it has outgrown the way in which short ones are computed."""
        return self.max_short_len is not None and len(self.token_ids) > self.max_short_len

    @property
    def position_offset(self) -> int:
        """What is added to positions: those of long sequences come behind all that short ones have."""
        return self.max_short_len if self.is_long and self.max_short_len is not None else self.first_position

    def append(self, token_id: int) -> None:
        """A new token of the answer."""
        self.token_ids.append(token_id)
        if self.adjustment is not None:
            self.adjustment.append(token_id)

    def start_over(self) -> None:
        """Forget the keys of blocks that were computed in the way of short sequences."""
        self.block_keys = [self._long_root_key]
        self._tail = (0, b"")

    @property
    def may_end(self) -> bool:
        """Whether an end token is possible now."""
        return self.num_generated >= self.params.min_tokens

    def spans_between(self, start: int, end: int) -> list[ImageSpan]:
        """Pictures with a placeholder in ``start <= i < end``."""
        return [span for span in self.image_spans if span.start < end and span.end > start]

    def pictures_for(self, start: int, end: int) -> list[ImageInput]:
        """Pictures that tokens ``start <= i < end`` are computed from: whose places they have, or what they look at."""
        images = [span.image for span in self.spans_between(start, end)]
        return images if self.cross is None else [*images, self.cross.image]

    def whole_range_at(self, place: int) -> tuple[int, int] | None:
        """The tokens that see each other and lie on both sides of the border before token number `place`."""
        return next((whole for whole in self.whole_ranges if whole[0] < place < whole[1]), None)

    def keys_of_full_blocks(self, count: int, block_size: int) -> list[bytes]:
        """Keys of the first `count` blocks, whose tokens are all known; each is computed once."""
        while len(self.block_keys) <= count:
            start = (len(self.block_keys) - 1) * block_size
            self.block_keys.append(self._key(self.block_keys[-1], start, start + block_size))
        return self.block_keys[1 : count + 1]

    def tail_key(self, num_tokens: int, block_size: int) -> bytes | None:
        """The key of what the first `num_tokens` tokens leave behind their last full block; None for nothing.

        Asked again for as many tokens, it is not computed again.
        """
        full = num_tokens // block_size
        start = full * block_size
        if start == num_tokens:
            return None
        if self._tail[0] != num_tokens:
            self.keys_of_full_blocks(full, block_size)
            self._tail = num_tokens, self._key(self.block_keys[full], start, num_tokens)
        return self._tail[1]

    def _key(self, parent: bytes, start: int, end: int) -> bytes:
        """The key of a block with tokens ``start <= i < end``, and with all that those of them see that come later."""
        whole = self.whole_range_at(end)
        # Where a range began before, the parent has all of it.
        reach = whole[1] if whole is not None and whole[0] >= start else end
        images = touched_images(self.image_spans, start, reach)
        return block_key(parent, self.token_ids[start:end], images, ahead=self.token_ids[end:reach])


def _without_pictures(prompt: Prompt) -> list[int]:
    token_ids, start = [], 0
    for span in prompt.images:
        token_ids += prompt.token_ids[start : span.start]
        start = span.end
    return token_ids + prompt.token_ids[start:]
