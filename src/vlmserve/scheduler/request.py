from __future__ import annotations

import msgspec

from vlmserve.cache.keys import block_key, cross_attention_root, cross_key, touched_images
from vlmserve.scheduler.block_table import BlockTable, KeyChain
from vlmserve.scheduler.drafts.reader import Drafting
from vlmserve.scheduler.state_slots import StateSlots
from vlmserve.steps import BlockIds, CachedRequest, NewRequest, bidirectional_spans
from vlmserve.tasks import Task
from vlmserve.types import (
    Bidirectional,
    EngineRequest,
    ImageInput,
    ImageSpan,
    Missed,
    TokenLogprobs,
)


class Request:
    """A request's tokens, progress and KV blocks.

    - answer_id: id of its output; only beams differ from `request_id`
    - token_ids: prompt and answer
    - num_computed: leading tokens in its blocks
    - chains, tables: keys and ids of its blocks, by pass and cache column
    - capacity: tokens with a place in all tables
    - unsent: whether the runner lacks some blocks
    - boundaries: numbers of leading tokens that other prompts may share
    - num_cached: prompt tokens found in the prefix cache when it first ran
    - bidirectional_spans: spans ``first <= i < last`` that one step computes
    - num_limited: leading tokens whose chunks resources may limit
    - scalings: X-LoRA's scalings by adapter, summed over computed tokens
    - missed: why other prompt tokens were not, until an output has it
    - max_short_len: beyond this, all tokens need other RoPE frequencies
    - prompt_logprobs: of leading prompt tokens, not yet output
    - arrived, started, vision_started, answered: `time.perf_counter`
    """

    __slots__ = (
        "_known_to_runner",
        "_root_keys",
        "adapter",
        "answer_id",
        "answered",
        "arrived",
        "arrived_at",
        "bidirectional_spans",
        "boundaries",
        "capacity",
        "chains",
        "client",
        "cross",
        "cross_key",
        "drafting",
        "end_token_ids",
        "image_spans",
        "max_len",
        "max_short_len",
        "missed",
        "num_cached",
        "num_computed",
        "num_encoded",
        "num_limited",
        "num_prompt_tokens",
        "num_shared",
        "params",
        "prediction",
        "priority",
        "prompt_logprobs",
        "request_id",
        "scalings",
        "seed",
        "started",
        "state",
        "stop_token_id",
        "tables",
        "task",
        "thoughts",
        "token_ids",
        "turn_end_ids",
        "unsent",
        "vision_seconds",
        "vision_started",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        root_key: bytes,
        seed: int,
        max_len: int,
        end_token_ids: frozenset[int],
        adapter: bytes = b"",
        scaling_root: bytes | None = None,
        max_short_len: int | None = None,
        bidirectional: Bidirectional | None = None,
    ) -> None:
        """scaling_root: of its scaling pass, if any."""
        self.request_id = self.answer_id = request.request_id
        self.params = request.params
        if request.prompt.thoughts is None and self.params.thinking_token_budget is not None:
            # the device need not wait for the host
            self.params = msgspec.structs.replace(self.params, thinking_token_budget=None)
        self.task: Task = request.task
        self.priority = request.priority
        self.client = request.client
        self.seed = seed
        self.adapter = adapter
        self.token_ids = list(request.prompt.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_shared = request.prompt.num_shared
        self.image_spans = request.prompt.images
        self.thoughts, self.prediction = request.prompt.thoughts, request.prompt.prediction
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self.num_computed = self.num_encoded = 0
        self.num_cached: int | None = None
        self.missed: Missed | None = None
        self.arrived = self.started = self.vision_started = self.answered = 0.0
        self.arrived_at = self.vision_seconds = 0.0
        self.scalings: list[float] = []
        self._known_to_runner = False
        self.drafting: Drafting | None = None
        self.cross = request.prompt.cross
        self.cross_key: bytes | None = None
        if self.cross is not None:
            self.cross_key = cross_key(self.cross.image.key, self.cross.token_ids)
            root_key = cross_attention_root(root_key, self.cross_key)
        placements = [span.placement for span in self.image_spans]
        self.bidirectional_spans = bidirectional_spans(placements, self.num_prompt_tokens, bidirectional)
        roots = [root_key] if scaling_root is None else [root_key, scaling_root]
        self._root_keys = roots
        self.max_short_len = max_short_len
        self.reset_block_keys()
        self.drop_blocks()
        self.boundaries: frozenset[int] | set[int] = frozenset()
        self.turn_end_ids = end_token_ids
        self.stop_token_id: int | None = None
        own_end = frozenset() if self.params.ignore_eos else end_token_ids
        self.end_token_ids = own_end | frozenset(self.params.stop_token_ids)
        wanted = max_len if self.params.max_tokens is None else self.num_prompt_tokens + self.params.max_tokens
        self.max_len = min(max_len, wanted)
        self.num_limited = self.num_prompt_tokens if self.cross is None else self.max_len

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_long(self) -> bool:
        return self.max_short_len is not None and len(self.token_ids) > self.max_short_len

    @property
    def num_short_left(self) -> int | None:
        """Tokens before `max_short_len`. None: no limit, or already long."""
        if self.max_short_len is None or self.is_long:
            return None
        return self.max_short_len - len(self.token_ids)

    @property
    def known_to_runner(self) -> bool:
        return self._known_to_runner

    def message(self, num_tokens: int, num_drafts: int = 0) -> NewRequest | CachedRequest:
        """num_drafts: of the tokens."""
        reached = self.num_computed + num_tokens - num_drafts
        states = None if self.state is None else self.state.message(reached)
        if self._known_to_runner:
            resumed = self.tables[0].num_sent == 0
            return CachedRequest(self.request_id, self.num_computed, num_tokens, *self._new_blocks(resumed), states)
        self._known_to_runner = True
        block_ids = [table.new_blocks().tolist() for table in self.tables]
        self.unsent = False
        return NewRequest(
            self.request_id,
            self.num_computed,
            num_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            token_ids=self.token_ids[:],
            block_ids=block_ids,
            params=self.params.without_model(),
            seed=self.seed,
            max_len=self.max_len,
            end_token_ids=sorted(self.end_token_ids),
            images=tuple(span.placement for span in self.image_spans),
            cross_key=self.cross_key,
            adapter=self.adapter,
            thoughts=self.thoughts,
            client=self.client,
            task=self.task,
            states=states,
        )

    def next_token(self) -> CachedRequest:
        """After an unknown one."""
        states = None if self.state is None else self.state.message(len(self.token_ids) + 1)
        return CachedRequest(self.request_id, len(self.token_ids), 1, *self._new_blocks(), states)

    def _new_blocks(self, resumed: bool = False) -> tuple[BlockIds, bool]:
        if not self.unsent:
            return (), resumed
        self.unsent = False
        return tuple(tuple(table.new_blocks()) for table in self.tables), resumed

    def fork(self, request_id: str, *token_ids: int) -> Request:
        """The new request holds nothing yet."""
        child = Request.__new__(Request)
        for name in Request.__slots__:  # faster than copy.copy
            setattr(child, name, getattr(self, name))
        child.request_id = request_id
        child.token_ids = [*self.token_ids, *token_ids]
        child.chains = [chain.copy() for chain in self.chains]
        child._known_to_runner = False
        child.drop_blocks()
        return child

    def add_scalings(self, sums: list[float]) -> None:
        self.scalings = [a + b for a, b in zip(self.scalings, sums, strict=True)] if self.scalings else sums

    def drop_blocks(self) -> None:
        self.tables: list[BlockTable] = []
        self.state: StateSlots | None = None
        self.capacity = self.num_computed = 0
        self.unsent = False

    def reset_block_keys(self) -> None:
        roots = [block_key(root, (), ()) for root in self._root_keys] if self.is_long else self._root_keys
        self.chains = [KeyChain(root) for root in roots]

    @property
    def has_images(self) -> bool:
        return bool(self.image_spans) or self.cross is not None

    def spans_between(self, start: int, end: int) -> list[ImageSpan]:
        if start >= self.num_prompt_tokens:
            return []
        return [span for span in self.image_spans if span.start < end and span.end > start]

    def images_for(self, start: int, end: int) -> list[ImageInput]:
        """For tokens ``start <= i < end``."""
        images = [span.image for span in self.spans_between(start, end)]
        return images if self.cross is None else [*images, self.cross.image]

    def bidirectional_span_at(self, place: int) -> tuple[int, int] | None:
        """Around the border before token `place`."""
        if not self.bidirectional_spans or place >= self.num_prompt_tokens:
            return None
        return next((span for span in self.bidirectional_spans if span[0] < place < span[1]), None)

    def keys_of_full_blocks(self, chain: KeyChain, count: int, block_size: int) -> list[bytes]:
        keys = chain.keys
        while len(keys) <= count:
            start = (len(keys) - 1) * block_size
            keys.append(self._key(keys[-1], start, start + block_size))
        return keys[1 : count + 1]

    def tail_key(self, chain: KeyChain, num_tokens: int, block_size: int) -> bytes | None:
        """The partly filled block at the end, if any."""
        full = num_tokens // block_size
        start = full * block_size
        if start == num_tokens:
            return None
        if num_tokens not in chain.tails:
            self.keys_of_full_blocks(chain, full, block_size)
            chain.tails[num_tokens] = self._key(chain.keys[full], start, num_tokens)
        return chain.tails[num_tokens]

    def _key(self, parent: bytes, start: int, end: int) -> bytes:
        """Cover all later tokens that tokens ``start <= i < end`` attend to."""
        span = self.bidirectional_span_at(end)
        # the parent covers a span that began earlier
        reach = span[1] if span is not None and span[0] >= start else end
        images = touched_images(self.image_spans, start, reach)
        return block_key(parent, self.token_ids[start:end], images, ahead=self.token_ids[end:reach])
