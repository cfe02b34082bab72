"""An engine without a model: deterministic text at a configured speed, for tests."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from vlmserve.cache.blocks import BlockPool
from vlmserve.cache.keys import cross_key
from vlmserve.engine.base import BaseEngine
from vlmserve.engine.grammars import grammar_compiler
from vlmserve.engine.lengths import context_length
from vlmserve.engine.mock_results import EMBEDDING_SIZE, mock_result
from vlmserve.errors import CheckpointNotFoundError
from vlmserve.prompt.checkpoint import read_prompt_files
from vlmserve.prompt.files import read_config
from vlmserve.sampling.bad_words import BadWords
from vlmserve.sampling.grammar import Allowed, Matcher
from vlmserve.sampling.thoughts import Thinking
from vlmserve.scheduler.beams import Beams
from vlmserve.settings.config import EngineConfig
from vlmserve.tasks import GENERATE, Generate
from vlmserve.types import (
    MAX_MAP_CELLS,
    BlockMap,
    EngineOutput,
    EngineRequest,
    EngineSnapshot,
    EngineStats,
    FinishReason,
    ModelInfo,
    Prompt,
    RequestSnapshot,
    RequestTimings,
    TokenLogprobs,
)

WORDS = (
    "a the one two three four five red green blue yellow orange purple black white small large round square circle "
    "triangle star image shows there is are on left right top bottom middle of and with next to above below dog cat"
)
_DEFAULT_CONTEXT = 4096
_MAX_SKIPPED = 256
"""Maximum forbidden tokens to skip."""
_NO_TOKEN = "no token of allowed_token_ids may come next; allow more tokens"
_MAX_SLEEP = 0.01
"""Maximum seconds of sleep per step, so that adds and aborts are noticed."""


class _Answer:
    """due: earliest time of its first token, by `time.monotonic`."""

    __slots__ = (
        "added", "added_at", "bad_words", "closing", "compiled", "digest", "due", "first", "length", "matcher",
        "max_tokens", "num_images", "num_thoughts", "permitted", "produced", "recent", "request", "shortest",
        "started", "thinking", "tokens", "vocab_size",
    )  # fmt: skip

    def __init__(
        self,
        request: EngineRequest,
        words: list[list[int]],
        digest: bytes,
        max_tokens: int,
        vocab_size: int,
        compiled: Future[Matcher] | None,
        closing: list[int],
    ) -> None:
        self.digest, self.closing = digest, closing
        self.compiled = compiled
        self.matcher: Matcher | None = None
        walk = [words[byte % len(words)] for byte in digest]
        self.request = request
        self.tokens = itertools.cycle(itertools.chain.from_iterable(walk))
        self.length = max(request.params.min_tokens, sum(map(len, walk[: 4 + digest[-1] % 24])))
        thoughts = request.prompt.thoughts
        self.thinking = Thinking.of(thoughts, request.params)
        self.num_thoughts = 2 + digest[-2] % 12
        allowed = request.params.allowed_token_ids
        self.permitted = None if allowed is None else frozenset(allowed)
        self.bad_words = BadWords(request.params.bad_token_ids)
        self.recent: deque[int] = deque(maxlen=self.bad_words.longest)
        self.shortest = 0
        self.max_tokens = min(max_tokens, request.params.max_tokens or max_tokens)
        self.num_images = request.prompt.num_images
        self.vocab_size = vocab_size
        self.produced = 0
        self.added, self.added_at = time.monotonic(), time.time()
        self.due = self.started = 0.0
        self.first: float | None = None

    @property
    def is_compiling(self) -> bool:
        return self.compiled is not None and not self.compiled.done()

    def advance(self, eos_token_ids: frozenset[int]) -> EngineOutput:
        """Produce one token, or end. The grammar must have compiled."""
        if not isinstance(task := self.request.task, Generate):
            result = mock_result(task, self.digest, len(self.request.prompt.token_ids))
            images = self.num_images
            return EngineOutput(self.request.request_id, [], "stop", images_encoded=images, result=result)
        if self.compiled is not None and self.matcher is None:
            if (error := self.compiled.exception()) is not None:
                params = self.request.params
                return self._failure(str(error), None if params.grammar is None else params.grammar.source)
            self.matcher = self.compiled.result()
            self.shortest = 0 if self.thinking is None else self.matcher.shortest()
        if self.thinking is not None and not self.thinking.is_over:
            token = self._thought(self.thinking)
            if token is not None:
                self.produced += 1
                self.length += 1
                return self._output([token], "length" if self.produced >= self.max_tokens else None)
        if self.matcher is not None:
            return self._advance_by(self.matcher, eos_token_ids)
        params = self.request.params
        ends = [id_ for id_ in sorted(eos_token_ids) if self.permitted is None or id_ in self.permitted]
        if self.produced >= self.length and not params.ignore_eos and ends:
            return self._output([], "stop", ends[0])
        can_stop = self.produced >= params.min_tokens
        token = self._word(frozenset() if can_stop else frozenset(params.stop_token_ids))
        if token is None:
            return self._failure(_NO_TOKEN, "allowed_token_ids")
        if token in params.stop_token_ids and can_stop:
            return self._output([], "stop", token)
        self.produced += 1
        finish_reason: FinishReason | None = "length" if self.produced >= self.max_tokens else None
        return self._output([token], finish_reason)

    def _word(self, banned: frozenset[int]) -> int | None:
        """Return an own token if allowed, else any allowed token, or None."""
        unwanted = self.bad_words.completing(list(self.recent))
        permitted = [] if self.permitted is None else sorted(self.permitted - banned)
        skipped = banned | unwanted
        for token in itertools.islice(self.tokens, _MAX_SKIPPED):
            if token not in skipped and (self.permitted is None or token in self.permitted):
                return token
        if self.permitted is None:
            return next(token for token in range(self.vocab_size) if token not in skipped)
        # As in the real engine, allowed tokens win over bad words.
        return next((token for token in permitted if token not in unwanted), permitted[0] if permitted else None)

    def _failure(self, error: str, param: str | None) -> EngineOutput:
        return EngineOutput(
            self.request.request_id, [], "error", error=error, images_encoded=self.num_images, error_param=param
        )

    def _thought(self, thinking: Thinking) -> int | None:
        left = self.max_tokens - self.produced
        token = thinking.forced(left, self.shortest)
        if token is None and thinking.is_before:
            if not thinking.may_begin(left, self.shortest):
                thinking.append(thinking.thoughts.end_id)
                return None
            token = thinking.thoughts.start_id
        elif token is None:
            is_done = thinking.num_tokens >= self.num_thoughts
            token = thinking.thoughts.end_id if is_done else self._word(frozenset())
            if token is None:
                token = thinking.thoughts.end_id
        thinking.append(token)
        return token

    def _output(
        self, token_ids: list[int], finish_reason: FinishReason | None, stop_token_id: int | None = None
    ) -> EngineOutput:
        params = self.request.params
        self.recent.extend(token_ids)
        logprobs = prompt_logprobs = None
        if params.logprobs is not None:
            logprobs = [_logprobs(token_id, params.logprobs, self.vocab_size) for token_id in token_ids]
        if params.prompt_logprobs is not None and self.first is None:
            prompt_logprobs = self._prompt_logprobs(params.prompt_logprobs)
        return EngineOutput(
            self.request.request_id,
            token_ids,
            finish_reason,
            stop_token_id,
            images_encoded=self.num_images,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _prompt_logprobs(self, count: int) -> list[TokenLogprobs | None]:
        prompt = self.request.prompt
        image_places = {place for span in prompt.images for place in range(span.start, span.end)}
        return [
            _logprobs(token_id, count, self.vocab_size) if place and place not in image_places else None
            for place, token_id in enumerate(prompt.token_ids)
        ]

    def _advance_by(self, matcher: Matcher, eos_token_ids: frozenset[int]) -> EngineOutput:
        """Produce an own word if the grammar allows one, else usually a token that closes JSON, else any token."""
        params = self.request.params
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        left = self.max_tokens - self.produced
        allowed = matcher.allowed(ends, may_end=self.produced >= params.min_tokens, left=left)
        if matcher.error is not None:
            return self._failure(matcher.error, None if params.grammar is None else params.grammar.source)
        possible = self._possible(allowed, ends)
        if len(possible) < np.count_nonzero(allowed):
            if not len(possible):
                return self._failure(_NO_TOKEN, "allowed_token_ids")
            allowed = np.isin(np.arange(len(allowed)), possible)
        end = next((id_ for id_ in sorted(ends) if id_ < len(allowed) and allowed[id_]), None)
        token = next(self.tokens)
        has_more = self.produced < self.length and allowed[token]
        if not len(possible) or (end is not None and not has_more):
            return self._output([], "stop", end)
        if not has_more:
            chance = blake3(self.digest + self.produced.to_bytes(4, "little")).digest(4)
            closing = [id_ for id_ in self.closing if allowed[id_]]
            token = (
                closing[0]
                if closing and chance[3] % 4
                else int(possible[int.from_bytes(chance[:3], "little") % len(possible)])
            )
        token = matcher.settle(token)
        matcher.advance(token)
        self.produced += 1
        finish_reason: FinishReason | None = "length" if self.produced >= self.max_tokens else None
        if matcher.cut and matcher.complete:
            finish_reason = "length"
        elif matcher.finished:
            finish_reason = "stop"
        return self._output([token], finish_reason)

    def _possible(self, allowed: Allowed, ends: frozenset[int]) -> npt.NDArray[np.int64]:
        """Return the permitted tokens of a mask without bad words. If only bad words remain, return those tokens."""
        possible = np.flatnonzero(allowed)
        if self.permitted is not None:
            possible = possible[np.isin(possible, [*self.permitted, *ends])]
        wanted = possible[~np.isin(possible, list(self.bad_words.completing(list(self.recent))))]
        return wanted if len(wanted) else possible

    def timings(self, now: float, *, ended: bool) -> RequestTimings:
        first = now if self.first is None else self.first
        return RequestTimings(
            self.started - self.added,
            0.0,
            first - self.started,
            now - first if ended else None,
            arrived=self.added_at,
        )

    def snapshot(self, *, runs: bool, block_size: int) -> RequestSnapshot:
        prompt = self.request.prompt
        num_tokens = len(prompt.token_ids) + self.produced
        return RequestSnapshot(
            request_id=self.request.request_id,
            state="running" if runs else "waiting",
            num_prompt_tokens=len(prompt.token_ids),
            num_tokens=num_tokens,
            num_computed_tokens=num_tokens - 1 if self.produced else 0,
            num_cached_tokens=0,
            num_images=prompt.num_images,
            num_blocks=self.num_blocks(block_size) if runs else 0,
        )

    def num_blocks(self, block_size: int) -> int:
        return -(-(len(self.request.prompt.token_ids) + self.produced) // block_size)


class MockEngine(BaseEngine):
    """A `VLMEngine` that answers with words chosen by the prompt's tokens, its images and the seed.

    It reasons if allowed, and batches continuously: a step takes `mock_tpot` seconds for up to `max_num_seqs` requests,
    and a request's first token takes `mock_ttft` seconds. Greedy requests ignore their seed. Penalties and biases have
    no effect.
    """

    def __init__(self, config: EngineConfig, folder: Path | None = None) -> None:
        """Raises CheckpointNotFoundError without a tokenizer.json, and the real engine's ConfigurationError."""
        if folder is None:
            from vlmserve.models.hub import resolve_model

            folder = resolve_model(config.model, config.revision, config.mmproj)
        self._config = config
        self._words, self._closing, vocab_size = _read_tokenizer(folder)
        self._eos_token_ids = read_prompt_files(folder).end_token_ids
        self._info = _model_info(config, folder, vocab_size, self._eos_token_ids)
        self._grammars = grammar_compiler(config, folder, self._info.vocab_size)
        self.unfinished: dict[str, _Answer] = {}
        self._waiting: deque[_Answer] = deque()
        self._running: dict[str, _Answer] = {}
        self._next_tick = 0.0
        self._prompt_tokens = self._generation_tokens = self._images = self._steps = 0
        self._step_seconds = 0.0

    def add(self, request: EngineRequest) -> None:
        self._check(request, self.unfinished, len(self._waiting), len(self._running))
        grammar = request.params.grammar
        if grammar is not None:
            self._grammars.check(grammar)
        answer = _Answer(
            request,
            self._words,
            self._digest(request),
            self._info.max_model_len - len(request.prompt.token_ids),
            self._info.vocab_size,
            None if grammar is None else self._grammars.begin(grammar, request.client),
            self._closing,
        )
        self.unfinished[request.request_id] = answer
        self._waiting.append(answer)

    def step(self) -> list[EngineOutput]:
        began = time.monotonic()
        self._admit()
        if not self._running:
            return []
        self._steps += 1
        if not self._sleep_until_due():
            self._step_seconds += time.monotonic() - began
            return []
        now = time.monotonic()
        outputs = []
        for answer in list(self._running.values()):
            if answer.due > now + self._config.mock_tpot / 2 or answer.is_compiling:
                continue
            output = answer.advance(self._eos_token_ids) if answer.request.beams is None else self._search(answer)
            self._generation_tokens += len(output.token_ids)
            ended = output.finish_reason is not None
            if ended or answer.first is None:
                output = msgspec.structs.replace(output, timings=answer.timings(now, ended=ended))
            answer.first = now if answer.first is None else answer.first
            if ended:
                del self._running[output.request_id], self.unfinished[output.request_id]
            outputs.append(output)
        if not outputs:
            self._wait_for_grammar()
        self._step_seconds += time.monotonic() - began
        return outputs

    def _wait_for_grammar(self) -> None:
        compiling = [answer.compiled for answer in self._running.values() if answer.compiled and answer.is_compiling]
        if compiling and len(compiling) == len(self._running):
            wait(compiling, _MAX_SLEEP, FIRST_COMPLETED)

    def abort(self, request_ids: Iterable[str]) -> None:
        aborted = set()
        for request_id in request_ids:
            if (answer := self.unfinished.pop(request_id, None)) is not None:
                aborted.add(request_id)
                if answer.compiled is not None:
                    answer.compiled.cancel()
        waiting = aborted - self._running.keys()
        for request_id in aborted - waiting:
            del self._running[request_id]
        if waiting:
            self._waiting = deque(a for a in self._waiting if a.request.request_id not in waiting)

    def has_work(self) -> bool:
        return bool(self.unfinished)

    def stats(self) -> EngineStats:
        size = self._config.block_size
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_blocks_total=self._config.max_num_seqs * -(-self._info.max_model_len // size),
            kv_blocks_used=sum(answer.num_blocks(size) for answer in self._running.values()),
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            images_encoded=self._images,
            steps=self._steps,
            step_seconds=self._step_seconds,
        )

    def inspect(self) -> EngineSnapshot:
        size = self._config.block_size
        requests = [answer.snapshot(runs=True, block_size=size) for answer in self._running.values()]
        requests += [answer.snapshot(runs=False, block_size=size) for answer in self._waiting]
        return EngineSnapshot(self.stats(), requests)

    def map_blocks(self) -> BlockMap:
        """Pretend that running requests use the first blocks, and nothing is cached."""
        stats = self.stats()
        pool = BlockPool(stats.kv_blocks_total)
        pool.allocate(stats.kv_blocks_used)
        return pool.draw_map(MAX_MAP_CELLS)

    def _search(self, answer: _Answer) -> EngineOutput:
        """Run a whole beam search. A beam continues as it would as a prompt."""
        request, prompt = answer.request, answer.request.prompt
        most = self._info.max_model_len - len(prompt.token_ids)
        beams = Beams.start(request, self._eos_token_ids, most)
        while not beams.done:
            choices = []
            for beam in beams.running:
                extended = Prompt(prompt.token_ids + list(beam.token_ids), prompt.images, prompt.cross)
                digest = self._digest(msgspec.structs.replace(request, prompt=extended, params=beams.params))
                token_id = self._words[digest[0] % len(self._words)][0]
                choices.append(_logprobs(token_id, beams.num_choices, self._info.vocab_size).top)
            beams.advance(choices)
        return beams.output(request.request_id, images_encoded=answer.num_images)

    def _admit(self) -> None:
        now = time.monotonic()
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            answer = self._waiting.popleft()
            answer.started = now
            answer.due = now + self._config.mock_ttft
            self._running[answer.request.request_id] = answer
            self._prompt_tokens += len(answer.request.prompt.token_ids)
            self._images += answer.request.prompt.num_images

    def _sleep_until_due(self) -> bool:
        """Sleep until the next due tick. Returns False if it is too far away."""
        tpot = self._config.mock_tpot
        if not (tpot or self._config.mock_ttft):
            return True
        now = time.monotonic()
        wake = max(self._next_tick, min(answer.due for answer in self._running.values()))
        pause = wake - now
        if pause > max(tpot, _MAX_SLEEP):
            time.sleep(max(tpot, _MAX_SLEEP))
            return False
        if pause > 0:
            time.sleep(pause)
        # Keep a steady rhythm, so that time between steps does not slow the mock engine down.
        late = self._next_tick < now - tpot
        self._next_tick = (max(wake, now) if late else wake) + tpot
        return True

    def _digest(self, request: EngineRequest) -> bytes:
        params = request.params
        is_greedy = params.temperature == 0 or request.task != GENERATE
        seed = 0 if is_greedy else self._config.seed if params.seed is None else params.seed + 1
        images = [(span.image.key, span.start) for span in request.prompt.images]
        if (cross := request.prompt.cross) is not None:
            images.append((cross_key(cross.image.key, cross.token_ids), 0))
        return blake3(msgspec.msgpack.encode((request.prompt.token_ids, images, seed))).digest()


def _logprobs(token_id: int, count: int, vocab_size: int) -> TokenLogprobs:
    """The token gets probability 3/4, and the next ids 1/8, 1/16 and so on."""
    top = tuple(
        ((token_id + further) % vocab_size, math.log(0.75 if further == 0 else 0.25 / 2**further))
        for further in range(min(count, vocab_size))
    )
    return TokenLogprobs(token_id, math.log(0.75), 1, top)


def _read_tokenizer(folder: Path) -> tuple[list[list[int]], list[int], int]:
    """Return the words of answers as token ids, the tokens that close JSON, and the vocabulary size."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointNotFoundError(f"{folder} has no tokenizer.json, which the mock engine takes its text from")
    tokenizer = Tokenizer.from_file(str(path))
    words: list[list[int]] = []
    for word in WORDS.split():
        once = tokenizer.encode(word, add_special_tokens=False).ids
        token_ids = tokenizer.encode(f"{word} {word}", add_special_tokens=False).ids[len(once) :]
        if tokenizer.decode(token_ids).strip() == word:
            words.append(token_ids)
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    closing = [id_ for sign in ("}", "]", '"') if (id_ := tokenizer.token_to_id(sign)) is not None]
    return words or [[token_id] for token_id in range(vocab_size)], closing, vocab_size


def _model_info(config: EngineConfig, folder: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> ModelInfo:
    checkpoint = read_config(folder)
    text = checkpoint.get("text_config") or checkpoint
    context = context_length(config, int(text.get("max_position_embeddings") or _DEFAULT_CONTEXT))
    return ModelInfo(
        name=config.model,
        architecture="mock",
        max_model_len=context,
        vocab_size=max(vocab_size, int(text.get("vocab_size") or 0)),
        dtype="float32" if config.dtype == "auto" else config.dtype,
        device="cpu",
        num_parameters=0,
        max_prompt_len=context - 1,
        kv_cache_bytes=0,
        kv_cache_tokens=config.max_num_seqs * -(-context // config.block_size) * config.block_size,
        supports_images="vision_config" in checkpoint,
        end_token_ids=sorted(eos_token_ids),
        embedding_size=EMBEDDING_SIZE,
    )
