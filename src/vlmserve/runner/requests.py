"""The runner's state of each request."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from vlmserve.layer_specs import PADDING_SLOT
from vlmserve.models.output_layers import OutputLayers
from vlmserve.models.protocols import LanguageModel
from vlmserve.runner.heads.choice import head_of
from vlmserve.sampling.bad_words import BadWords
from vlmserve.sampling.grammar import Allowed
from vlmserve.sampling.guide import ComputeMask, Guide, Guides, MakeMatcher
from vlmserve.sampling.logits_processor import LogitsProcessor
from vlmserve.sampling.ngrams import RepeatedNgrams
from vlmserve.sampling.sampler import SamplingRow
from vlmserve.sampling.thoughts import Thinking
from vlmserve.steps import CachedRequest, NewRequest, SchedulerOutput, StateStep, bidirectional_spans
from vlmserve.types import ImagePlacement

_NOTHING_BANNED: frozenset[int] = frozenset()
_IMAGE = -1
"""Stands for an image, so that no n-gram spans it."""


class RequestState:
    __slots__ = (
        "_first_position",
        "_max_short_len",
        "_vocab_size",
        "adapter",
        "bad_words",
        "bidirectional_spans",
        "block_tables",
        "cross_key",
        "end_token_ids",
        "guide",
        "head",
        "images",
        "is_plain_text",
        "logits_processor",
        "max_len",
        "ngrams",
        "num_blocks",
        "num_prompt_tokens",
        "num_scored",
        "params",
        "permitted",
        "predicted_since",
        "request_id",
        "seed",
        "slots",
        "thinking",
        "token_ids",
    )

    def __init__(
        self,
        request: NewRequest,
        model: LanguageModel,
        guides: Guides | None = None,
        layers: OutputLayers | None = None,
    ) -> None:
        """guides: for grammars. layers: for embeddings."""
        self.request_id = request.request_id
        self.token_ids = list(request.token_ids)
        self.num_prompt_tokens = request.num_prompt_tokens
        self.block_tables = [array("i", blocks) for blocks in request.block_ids]
        """By pass of the model and cache column. A preempted request gets new lists."""
        self.num_blocks = sum(map(len, self.block_tables))
        self.predicted_since: int | None = None
        """The first token that the layer for multi-token prediction reads. None: as its blocks say."""
        padding = [PADDING_SLOT] * len(request.block_ids)
        self.slots = padding if request.states is None else [one.slot for one in request.states]
        """Working slots of states by pass. The padding slot without states and in warm-up."""
        self.params = request.params
        self.head = head_of(request.task, request.num_prompt_tokens, layers)
        """Reads states or logits instead of the sampler. None: tokens are sampled."""
        self.seed = request.seed
        self.max_len = request.max_len
        self.end_token_ids = frozenset(request.end_token_ids)
        self.images = request.images
        if not model.grid_positions:
            self.images = tuple(msgspec.structs.replace(image, grid=None) for image in request.images)
        self.cross_key = request.cross_key
        self.adapter = request.adapter
        """Digest, or empty."""
        self.bidirectional_spans = bidirectional_spans(request.images, self.num_prompt_tokens, model.bidirectional)
        """Ranges ``first <= i < last`` of tokens that attend to each other in both directions."""
        scores_prompt = self.params.prompt_logprobs is not None and self.num_prompt_tokens > 1
        self.num_scored = 1 if scores_prompt else None
        """Leading prompt tokens with log-probabilities, while more are wanted."""
        self.thinking = Thinking.of(request.thoughts, self.params)
        """Tracks the reasoning, where the grammar does not apply."""
        self.guide: Guide | None = None
        if self.params.grammar is not None and guides is not None:
            measures = self.thinking is not None
            self.guide = guides.start(self.params.grammar, request.client, self._next_mask(), measures=measures)
        self.logits_processor: LogitsProcessor | None = None
        if self.params.logit_bias or self.params.penalizes:
            self.logits_processor = LogitsProcessor(self.params, self._text_tokens())
        self.ngrams: RepeatedNgrams | None = None
        if size := self.params.no_repeat_ngram_size:
            self.ngrams = RepeatedNgrams(self._text_tokens([_IMAGE]), size, self.params.no_repeat_ngram_window)
        self.bad_words = BadWords(self.params.bad_token_ids) if self.params.bad_token_ids else None
        self.permitted: Allowed | None = None
        """Tokens that the request allows, ``[vocabulary]``. None: all."""
        if self.params.allowed_token_ids is not None:
            self.permitted = np.zeros(model.vocab_size, np.bool_)
            self.permitted[[*self.params.allowed_token_ids, *(self.end_token_ids if self.guide else ())]] = True
        self._vocab_size = model.vocab_size
        self._first_position = model.first_position(self.num_prompt_tokens)
        self._max_short_len = model.max_short_len
        is_special = bool(self.images or self.bidirectional_spans) or self.cross_key is not None
        self.is_plain_text = not is_special and not self._first_position and self._max_short_len is None

    @property
    def position_offset(self) -> int:
        """Long requests start after all positions of short requests."""
        if self._max_short_len is not None and len(self.token_ids) > self._max_short_len:
            return self._max_short_len
        return self._first_position

    def images_between(self, start: int, end: int) -> list[ImagePlacement]:
        return [image for image in self.images if image.start < end and image.end > start]

    def sampling_row(self, pending: int = 0) -> SamplingRow:
        """pending: earlier tokens that are not known here yet."""
        num_generated = len(self.token_ids) - self.num_prompt_tokens + pending
        if self.thinking is not None and (forced := self.forced) is not None:
            return SamplingRow(self.params, self.seed, num_generated, forced=forced)
        may_end = num_generated >= self.params.min_tokens
        banned, allowed = _NOTHING_BANNED, None
        if self.guide is not None and not self.is_thinking:
            allowed = self._allowed(self.guide)
        elif self.guide is not None or not may_end:
            banned = self.end_token_ids
        if self.thinking is not None and self.thinking.is_before:
            start_id = self.thinking.thoughts.start_id
            may_think = self.thinking.may_begin(self._left, self._shortest_answer)
            if allowed is not None:
                allowed[start_id] = may_think and allowed.any()
            elif not may_think:
                banned |= {start_id}
        if self.permitted is not None:
            allowed = self.permitted if allowed is None else allowed & self.permitted
        if self.ngrams is not None or self.bad_words is not None:
            banned |= self._unwanted(allowed)
        return SamplingRow(self.params, self.seed, num_generated, banned, self.logits_processor, allowed)

    @property
    def is_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.is_inside

    @property
    def forced(self) -> int | None:
        """The only allowed next token, if the reasoning has to end."""
        return None if self.thinking is None else self.thinking.forced(self._left, self._shortest_answer)

    @property
    def _shortest_answer(self) -> int:
        return 0 if self.guide is None else self.guide.shortest

    @property
    def _left(self) -> int:
        return self.max_len - len(self.token_ids)

    def settles(self, token_id: int) -> bool:
        if self.guide is None or not self.guide.searches:
            return False
        return self.thinking is None or not self.thinking.takes(token_id)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.logits_processor is not None:
            self.logits_processor.append(token_id)
        if self.ngrams is not None:
            self.ngrams.append(token_id)
        is_thought = False
        if self.thinking is not None:
            is_thought = self.thinking.takes(token_id)
            self.thinking.append(token_id)
        if self.guide is not None:
            if not is_thought:
                self.guide.advance(token_id)
            mask = None if self.guide.finished or self._left <= 0 else self._next_mask()
            if mask is not None:
                self.guide.expect(mask, self._left)

    def _next_mask(self) -> ComputeMask | None:
        """None: inside reasoning."""
        if self.is_thinking:
            return None
        ends, left = self.end_token_ids, self._left
        may_end = len(self.token_ids) - self.num_prompt_tokens >= self.params.min_tokens
        return lambda matcher: matcher.allowed(ends, may_end=may_end, left=left)

    def _allowed(self, guide: Guide) -> Allowed:
        mask = guide.allowed
        return np.zeros(self._vocab_size, np.bool_) if mask is None else mask

    def set_blocks(self, scheduled: CachedRequest) -> None:
        if scheduled.resumed:
            self.block_tables = [array("i") for _ in self.block_tables]
            self.num_blocks, self.predicted_since = 0, None
        for table, blocks in zip(self.block_tables, scheduled.new_block_ids, strict=True):
            table.extend(blocks)
            self.num_blocks += len(blocks)

    def _unwanted(self, allowed: Allowed | None) -> frozenset[int]:
        """Return tokens that would repeat an n-gram or complete a bad word, unless no other token is allowed."""
        unwanted = _NOTHING_BANNED if self.ngrams is None else self.ngrams.repeating()
        if self.bad_words is not None:
            first = max(self.num_prompt_tokens, len(self.token_ids) - self.bad_words.longest)
            unwanted |= self.bad_words.completing(self.token_ids[first:])
        if allowed is not None and unwanted and np.count_nonzero(allowed) == np.count_nonzero(allowed[[*unwanted]]):
            return _NOTHING_BANNED
        return unwanted

    def _text_tokens(self, instead: Sequence[int] = ()) -> list[int]:
        token_ids, start = [], 0
        for image in self.images:
            token_ids += [*self.token_ids[start : image.start], *instead]
            start = image.end
        return token_ids + self.token_ids[start:]


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """Tokens ``start <= i < start + num_tokens`` of a request, ending with its drafts."""

    state: RequestState
    start: int
    num_tokens: int
    draft_token_ids: list[int]
    num_sampled: int
    """Number of last tokens with logits. 0 except in the last chunk of a prompt, and for heads that read none."""
    pending: bool = False
    """True if the previous step is still sampling its only token."""
    state_steps: tuple[StateStep, ...] | None = None
    """By pass. None: states stay in their working slots."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def last_right(self, end_row: int, num_sampled: int) -> tuple[int, int]:
        """Return the row of the last token that is not a wrong draft, and the index of the token after it.

        end_row: the row after this request's rows. num_sampled: tokens that the step sampled for it.
        """
        row = end_row - len(self.draft_token_ids) + max(0, num_sampled - 1) - 1
        return row, self.start + row + 1 - (end_row - self.num_tokens)


class RequestStates:
    def __init__(self, model: LanguageModel, make_matcher: MakeMatcher, layers: OutputLayers | None = None) -> None:
        self._model, self._layers = model, layers
        self._guides = Guides(make_matcher)
        self._states: dict[str, RequestState] = {}
        self._has_adapters = False

    def __len__(self) -> int:
        return len(self._states)

    def append(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        for request_id, tokens in token_ids.items():
            state = self._states[request_id]
            for token in tokens:
                if token not in state.end_token_ids:
                    state.append(token)

    def update(self, step: SchedulerOutput) -> list[ScheduledRequest]:
        """Return a step's batch: decodes (one token) first, as attention needs, with requests of an adapter
        adjacent.
        """
        states = self._states
        for request_id in step.finished_request_ids:
            guide = states.pop(request_id).guide
            if guide is not None:
                guide.close()
        for new in step.new_requests:
            states[new.request_id] = RequestState(new, self._model, self._guides, self._layers)
            self._has_adapters = self._has_adapters or bool(new.adapter)
        for cached in step.cached_requests:
            if cached.new_block_ids:
                states[cached.request_id].set_blocks(cached)
            if cached.states is not None:
                states[cached.request_id].slots = [one.slot for one in cached.states]
        decodes: list[ScheduledRequest] = []
        others: list[ScheduledRequest] = []
        for request in step.requests:
            state, start, num_tokens = states[request.request_id], request.start, request.num_tokens
            drafts = step.draft_token_ids.get(request.request_id, _NO_DRAFTS)
            pending = start == len(state.token_ids)
            num_sampled = 1 if pending else max(0, start + num_tokens + 1 - len(state.token_ids))
            if state.head is not None:
                num_sampled = 0
            scheduled = ScheduledRequest(state, start, num_tokens, drafts, num_sampled, pending, request.states)
            (decodes if num_tokens == 1 else others).append(scheduled)
        if self._has_adapters:
            decodes.sort(key=_adapter)
            others.sort(key=_adapter)
        return decodes + others


def _adapter(scheduled: ScheduledRequest) -> bytes:
    return scheduled.state.adapter


_NO_DRAFTS: list[int] = []
