"""Requests of a caller in this process: prepared ahead within bounds, answered together, returned in order."""

from __future__ import annotations

import itertools
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vlmserve.config import OfflineConfig
from vlmserve.engine.admission import check_length
from vlmserve.errors import InvalidRequestError, InvalidRequestsError
from vlmserve.outputs import CompletionOutput, RequestOutput, logprobs_by_id
from vlmserve.types import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    ModelInfo,
    Prompt,
    SamplingParams,
    TokenLogprobs,
    mean_logprob,
)

if TYPE_CHECKING:
    from vlmserve.engine.protocol import VLMEngine
    from vlmserve.frontend.reasoning import AnswerText, Said
    from vlmserve.frontend.requests import RequestPreparer


class LoRARequest(NamedTuple):
    """The adapter that answers, under vLLM's names.

    lora_name: under which it is served. lora_int_id: vLLM's number for it, which has no effect. lora_path: of its
    folder or repository, from which it is loaded if none of that name and path is served; "": it is served already.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class Prepared(NamedTuple):
    """A prompt that is ready for the engine. text: as the caller wrote it; None: it was made of something else.
    adapter: the name of the adapter that answers; "": the model itself."""

    prompt: Prompt
    cache_salt: str = ""
    text: str | None = None
    adapter: str = ""

    @property
    def num_bytes(self) -> int:
        """Memory of its token ids and images."""
        return 8 * len(self.prompt.token_ids) + sum(image.pixels.nbytes for image in self.prompt.image_inputs)


@dataclass(eq=False)
class Generation:
    """One answer in the engine and the text that it has brought so far."""

    request_id: str
    params: SamplingParams
    answer_text: AnswerText
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_images_encoded: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def take(self, output: EngineOutput) -> None:
        """Add a step's output. Text after a stop string is dropped."""
        self.num_cached_tokens, self.num_images_encoded = output.cached_tokens, output.images_encoded
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self._say(self.answer_text.push(output.token_ids))
        count = self.answer_text.num_tokens - len(self.token_ids)
        self.token_ids += output.token_ids[:count]
        self.logprobs += (output.logprobs or [])[:count]
        if self.answer_text.stopped:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            self._say(self.answer_text.finish())
            self.finish_reason = "stop" if self.answer_text.stopped else output.finish_reason
            self.stop_token_id, self.error = output.stop_token_id, output.error

    def _say(self, said: Said) -> None:
        self.pieces.append(said.text)
        self.thoughts.append(said.thought)

    @property
    def likelihood(self) -> float:
        """By which the best of several is chosen: thoughts do not count."""
        return mean_logprob(self.logprobs[self.answer_text.num_reasoning_tokens :])

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or token of the request that ended it."""
        if self.answer_text.stop_string is not None:
            return self.answer_text.stop_string
        return self.stop_token_id if self.stop_token_id in self.params.stop_token_ids else None


class OfflineRequest:
    """A prompt with its answers, of which there are several with `n`."""

    def __init__(self, request_id: str, prepared: Prepared, params: SamplingParams, preparer: RequestPreparer) -> None:
        self.request_id = request_id
        self.params = params
        self._text = prepared.text
        self._prompt: Prompt | None = prepared.prompt
        self._prompt_text = preparer.prompt_text
        self._token_bytes = preparer.token_bytes
        several, ranked = params.num_samples > 1, params.num_samples > params.n
        self.requests: list[EngineRequest] = []
        self.generations: list[Generation] = []
        for index in range(params.num_samples):
            own = params.without_model().of_sample(index, ranked=ranked)
            own_id = f"{request_id}-{index}" if several else request_id
            adapter = prepared.adapter
            self.requests.append(EngineRequest(own_id, prepared.prompt, own, prepared.cache_salt, adapter=adapter))
            self.generations.append(Generation(own_id, own, preparer.answer_text(own, prepared.prompt.thoughts)))

    @property
    def has_begun(self) -> bool:
        """Whether an answer has its first token."""
        return any(one.token_ids or one.finish_reason is not None for one in self.generations)

    @property
    def finished(self) -> bool:
        return all(one.finish_reason is not None for one in self.generations)

    def result(self) -> RequestOutput:
        """What came of it, once it has finished."""
        prompt = self.requests[0].prompt
        first = self.generations[0]
        best = self.generations
        if self.params.num_samples > self.params.n:
            best = sorted(best, key=lambda one: one.likelihood, reverse=True)[: self.params.n]
        prompt_logprobs = first.prompt_logprobs
        by_id = None
        if prompt_logprobs is not None:
            by_id = [one if one is None else logprobs_by_id(one, self._token_bytes) for one in prompt_logprobs]
        return RequestOutput(
            self.request_id,
            self._prompt_text(prompt) if self._text is None else self._text,
            prompt.token_ids,
            [self._completion(index, one) for index, one in enumerate(best)],
            first.num_cached_tokens,
            sum(one.num_images_encoded for one in self.generations),
            by_id,
            image_sizes=prompt.image_sizes,
        )

    def _completion(self, index: int, generation: Generation) -> CompletionOutput:
        assert generation.finish_reason is not None
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = [logprobs_by_id(one, self._token_bytes) for one in generation.logprobs]
        return CompletionOutput(
            index,
            "".join(generation.pieces),
            generation.token_ids,
            generation.finish_reason,
            generation.stop_reason,
            generation.error,
            logprobs,
            self.params.grammar,
            "".join(generation.thoughts) or None,
        )


def check_lengths(prepared: Prepared, params: SamplingParams, info: ModelInfo) -> None:
    """Raise InvalidRequestError for an answer that would be longer than what the context has left after the prompt."""
    for name, wanted in (("max_tokens", params.max_tokens), ("min_tokens", params.min_tokens)):
        check_length(name, wanted or 0, prepared.prompt, info)


class OfflineRequests:
    """The requests that callers in this process have in the engine. engine: gets it, and loads its model if need be."""

    def __init__(self, engine: Callable[[], VLMEngine], preparer: RequestPreparer) -> None:
        self._engine = engine
        self._preparer = preparer
        self._generations: dict[str, Generation] = {}
        self._ids = itertools.count()

    def add(self, prepared: Prepared, params: SamplingParams) -> OfflineRequest:
        """Queue all answers to a prompt, or none if it is refused. Raises what the engine does."""
        engine = self._engine()
        check_lengths(prepared, params, engine.info)
        request = OfflineRequest(f"offline-{next(self._ids)}", prepared, params, self._preparer)
        try:
            for one, generation in zip(request.requests, request.generations, strict=True):
                engine.add(one)
                self._generations[generation.request_id] = generation
        except BaseException:
            self.forget([request])
            raise
        return request

    def step(self) -> int:
        """One step of the engine; its outputs go to all unfinished requests, suspended streams included.

        Returns the number of new tokens.
        """
        num_tokens, stopped = 0, []
        with _interrupts_held_back():
            for output in self._engine().step():
                generation = self._generations.get(output.request_id)
                if generation is None:
                    continue
                num_tokens += len(output.token_ids)
                generation.take(output)
                if generation.finish_reason is not None and output.finish_reason is None:
                    stopped.append(output.request_id)
            self._engine().abort(stopped)
        return num_tokens

    def forget(self, requests: Sequence[OfflineRequest]) -> None:
        """Abort what has not finished, and drop all of it."""
        generations = [generation for request in requests for generation in request.generations]
        if not generations:
            return
        with _interrupts_held_back():
            self._engine().abort([one.request_id for one in generations if one.finish_reason is None])
            for generation in generations:
                self._generations.pop(generation.request_id, None)


@dataclass(eq=False)
class _Job:
    """One of a list. num_bytes: of its prompt, once it is prepared."""

    number: int
    params: SamplingParams
    num_bytes: int | None = None
    request: OfflineRequest | None = None
    outcome: RequestOutput | InvalidRequestError | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether it waits for its turn."""
        return self.request is None or not self.request.has_begun


class OfflineBatch:
    """Answers to a list, of which no more is prepared ahead than `bounds` says.

    items: what prepares each of them, in a worker thread, and its params. window: how many may be under way or wait for
    an earlier one; None: any number, as the caller keeps all results anyway. raises: whether to end with an error if
    something is wrong with any of them. name: adds an item's place to an error. advance: called after each step
    how many requests have finished, and of new tokens.
    """

    def __init__(
        self,
        requests: OfflineRequests,
        items: Iterator[tuple[Callable[[], Prepared], SamplingParams]],
        *,
        bounds: OfflineConfig,
        num_threads: int,
        window: int | None,
        raises: bool,
        name: Callable[[Exception, int], None],
        advance: Callable[[int, int], None],
    ) -> None:
        self._requests, self._items, self._bounds = requests, items, bounds
        self._num_threads, self._window, self._raises = num_threads, window, raises
        self._name, self._advance = name, advance
        self._count = self._largest = 0
        self._exhausted = False
        self._unyielded: deque[_Job] = deque()
        self._preparing: deque[tuple[_Job, Future[Prepared]]] = deque()
        self._running: list[_Job] = []
        self._errors: list[InvalidRequestError] = []

    def results(self) -> Generator[RequestOutput | InvalidRequestError, None, None]:
        """In order, each as soon as it and all before it have ended. Closing the iterator ends all requests.

        Raises InvalidRequestError, or InvalidRequestsError for several, if it is to.
        """
        executor = ThreadPoolExecutor(self._num_threads, "prepare")
        try:
            while True:
                self._fill(executor)
                self._admit(wait=not self._running)
                if self._errors:
                    self._fail(executor)
                while self._unyielded and self._unyielded[0].outcome is not None:
                    outcome = self._unyielded.popleft().outcome
                    assert outcome is not None
                    yield outcome
                if self._running:
                    self._step()
                elif self._exhausted and not self._unyielded:
                    return
        finally:
            executor.shutdown(wait=True, cancel_futures=True)
            self._requests.forget([job.request for job in self._running if job.request is not None])

    def _fill(self, executor: ThreadPoolExecutor) -> None:
        """Have as many prepared as the bounds allow."""
        while not self._exhausted:
            ahead = [job for job, _ in self._preparing] + [job for job in self._running if job.is_ahead]
            known = [job.num_bytes for job in ahead if job.num_bytes is not None]
            self._largest = max([self._largest, *known])
            # What is not yet prepared is taken to be as large as the largest before.
            num_bytes = sum(known) + self._largest * (len(ahead) - len(known))
            most = self._bounds.prepare_ahead if self._largest else self._num_threads
            if ahead and (len(ahead) >= most or num_bytes >= self._bounds.prepare_ahead_memory):
                return
            if self._window is not None and len(self._unyielded) >= self._window:
                return
            found = next(self._items, None)
            if found is None:
                self._exhausted = True
                return
            prepare, params = found
            job = _Job(self._count, params)
            self._count += 1
            self._unyielded.append(job)
            self._preparing.append((job, executor.submit(_measured, prepare, job)))

    def _admit(self, *, wait: bool) -> None:
        """Give the engine what is prepared, in order, so that seeds do not depend on which is prepared first.

        wait: for the first one.
        """
        while self._preparing and (wait or self._preparing[0][1].done()):
            job, future = self._preparing.popleft()
            wait = False
            try:
                job.request = self._requests.add(future.result(), job.params)
                self._running.append(job)
            except Exception as error:
                self._name(error, job.number)
                if not isinstance(error, InvalidRequestError):
                    raise
                job.outcome = error
                self._errors += [error] if self._raises else []

    def _step(self) -> None:
        num_tokens = self._requests.step()
        num_finished = 0
        for job in self._running:
            if job.request is not None and job.request.finished:
                job.outcome, finished, job.request = job.request.result(), job.request, None
                self._requests.forget([finished])
                num_finished += 1
        self._running = [job for job in self._running if job.request is not None]
        self._advance(num_finished, num_tokens)

    def _fail(self, executor: ThreadPoolExecutor) -> None:
        """Look for what else is wrong, answer nothing more, and raise."""
        while True:
            self._requests.forget([job.request for job in self._running if job.request is not None])
            self._running.clear()
            self._unyielded.clear()
            if self._window is None:
                self._fill(executor)
            if not self._preparing:
                break
            self._admit(wait=True)
        raise self._errors[0] if len(self._errors) == 1 else InvalidRequestsError(self._errors)


def _measured(prepare: Callable[[], Prepared], job: _Job) -> Prepared:
    prepared = prepare()
    job.num_bytes = prepared.num_bytes
    return prepared


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Raise KeyboardInterrupt after the block, not in it: an engine left in the middle of a step is of no use."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    interrupted = False

    def remember(_signal: int, _frame: object) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt
