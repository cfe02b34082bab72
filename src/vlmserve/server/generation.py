"""Generates a request's answers: from prompts to text deltas and usage."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from vlmserve.cancellation import client as sender
from vlmserve.errors import InvalidRequestError, VLMServeError
from vlmserve.frontend.beams import start_beam_search
from vlmserve.frontend.best import mean_logprob
from vlmserve.frontend.client import EngineClient
from vlmserve.frontend.reasoning import AnswerText, Said
from vlmserve.frontend.tools import ToolUse
from vlmserve.server.errors import error_code
from vlmserve.server.metrics import AnswerRecord
from vlmserve.server.schema.usage import CompletionTokensDetails, PromptTokensDetails, Usage
from vlmserve.server.service import Service
from vlmserve.tasks import GENERATE, Embed, Prefill, Task, TaskResult
from vlmserve.types import (
    BeamSearch,
    EngineOutput,
    EngineRequest,
    ImageSize,
    Missed,
    Prompt,
    RequestTimings,
    SamplingParams,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Answers to each prompt, by beam search if `beams` is set."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    num_answers: int = 1
    cache_salt: str = ""
    beams: BeamSearch | None = None
    tools: ToolUse | None = None
    """Tools that the answers may call."""
    num_samples: int = 1
    """Answers to generate for each prompt; more than `num_answers` to return the most likely ones (`best_of`)."""
    generates: bool = True
    """False only computes the prompts."""
    every_token: bool = False
    """Return logprobs of all tokens, including reasoning, stop strings and end tokens."""
    task: Task = GENERATE
    tasks: Sequence[Task] | None = None
    """Tasks of the prompts, in place of `task`."""
    shared: Prompt | None = None
    """Common prefix of all prompts, computed first so that they find it cached."""

    def params_of(self, index: int) -> SamplingParams:
        """Its own seed if one is set, and logprobs if the most likely are returned."""
        return self.params.of_sample(index, ranked=self.num_samples > self.num_answers)


class OffsetLogprobs(NamedTuple):
    """offset: the token's start in the answer, in characters."""

    logprobs: TokenLogprobs
    offset: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    index: int
    text: str
    finish_reason: str | None = None
    """The last delta has "stop" or "length"."""
    stop_string: str | None = None
    """The stop string that ended the answer."""
    logprobs: tuple[OffsetLogprobs, ...] = ()
    """Logprobs of the tokens of `text`, if requested."""
    thought: str = ""
    """New text of the reasoning before the answer."""
    token_ids: tuple[int, ...] = ()
    """All tokens since the last delta, including the end token."""


class OutputStream(Protocol):
    """The outputs of an answer, in order. Closing the stream aborts the answer."""

    def __aiter__(self) -> AsyncIterator[EngineOutput]: ...

    def close(self) -> None: ...


class Answer:
    def __init__(
        self, index: int, stream: OutputStream, text: AnswerText, record: AnswerRecord, request: GenerationRequest
    ) -> None:
        self.index = index
        self._request = request
        self._new_ids: list[int] = []
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_images_encoded = 0
        self.num_accepted_drafts = self.num_rejected_drafts = 0
        self.missed: Missed | None = None
        self.finish_reason: str | None = None
        """Why it ended; None while it runs, and after an abort."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        """Logprobs of the prompt, if requested; set at the first delta."""
        self.result: TaskResult | None = None
        """Values of tasks other than `Generate`; set at the only delta."""
        self._held: deque[OffsetLogprobs] = deque()
        self._stream = stream
        self._text = text
        self._record = record

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Yield text as it comes. Raises VLMServeError. Closing aborts the answer."""
        try:
            async for output in self._stream:
                self._record.output(output)
                if output.finish_reason in ("abort", "error"):
                    message = output.error or "The engine aborted this request"
                    if output.error_param is not None:
                        raise InvalidRequestError(message, param=output.error_param)
                    raise VLMServeError(message)
                self.num_cached_tokens, self.num_images_encoded = output.cached_tokens, output.images_encoded
                self.num_accepted_drafts, self.num_rejected_drafts = output.accepted_drafts, output.rejected_drafts
                self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
                self.missed = self.missed or output.missed
                self.result = output.result
                if not self._request.generates:
                    self.finish_reason = "length"
                    self._record.end("length")
                    yield TextDelta(self.index, "", "length")
                    return
                thought, text = self._push(output)
                stop_string = self._text.stop_string
                ended = output.stop_token_id is not None and stop_string is None
                self.num_tokens = self._text.num_tokens + ended
                finish_reason = "stop" if stop_string is not None else output.finish_reason
                if finish_reason is not None:
                    self.finish_reason = finish_reason
                    self._record.end(finish_reason)
                if text or thought or finish_reason is not None:
                    shown = self._shown(finish_reason)
                    new_ids, self._new_ids = tuple(self._new_ids), []
                    yield TextDelta(self.index, text, finish_reason, stop_string, shown, thought, new_ids)
                if finish_reason is not None:
                    return
        except VLMServeError:
            self._record.end("error")
            raise
        finally:
            self.close()

    @property
    def timings(self) -> RequestTimings | None:
        """Durations of the answer's phases; None before the first token."""
        return self._record.timings

    @property
    def ttft(self) -> float | None:
        """Seconds from the request's arrival; None before the first token."""
        return self._record.ttft

    @property
    def num_reasoning_tokens(self) -> int:
        return self._text.num_reasoning_tokens

    def _push(self, output: EngineOutput) -> Said:
        """Add an output, and return the text that may be shown."""
        before = self._text.num_tokens
        if output.logprobs is None:
            said = [self._text.push(output.token_ids)]
        else:
            said = []
            for token_id, logprobs in zip(output.token_ids, output.logprobs, strict=True):
                offset, thoughts = self._text.num_decoded, self._text.num_reasoning_tokens
                if not (self._text.stopped and self._request.every_token):
                    self._held.append(OffsetLogprobs(logprobs, offset))
                said.append(self._text.push([token_id]))
                if not self._request.every_token:
                    for _ in range(self._text.num_reasoning_tokens - thoughts):
                        self._held.pop()
        self._new_ids += output.token_ids[: self._text.num_tokens - before]
        if output.finish_reason is not None:
            keeps_end = self._request.params.include_stop_str_in_output
            said.append(self._text.finish(output.stop_token_id if keeps_end else None))
        if output.stop_token_id is not None and not self._text.stopped:
            self._new_ids.append(output.stop_token_id)
            if self._request.every_token and output.stop_logprobs is not None:
                self._held.append(OffsetLogprobs(output.stop_logprobs, self._text.num_decoded))
        return Said("".join(one.thought for one in said), "".join(one.text for one in said))

    def _shown(self, finish_reason: str | None) -> tuple[OffsetLogprobs, ...]:
        """Tokens whose text is complete and was not returned yet; without a stop string's tokens."""
        if self._request.every_token or (finish_reason is not None and self._text.stop_string is None):
            count = len(self._held)
        else:
            count = sum(held.offset < self._text.num_shown for held in self._held)
        return tuple(self._held.popleft() for _ in range(count))

    def close(self) -> None:
        self._stream.close()
        self._record.end("abort")


class Generation:
    """answers: all samples, prompt by prompt. first_request_ids: of the engine's first requests."""

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        answers: Sequence[Answer],
        generation_id: str,
        first_request_ids: Sequence[str],
        adapter: str = "",
        relaxed: Sequence[str] = (),
    ) -> None:
        self.id = generation_id
        self.relaxed = relaxed
        """Schema keywords that the answers need not obey."""
        self.first_request_ids = first_request_ids
        self.created = int(time.time())
        self.model = adapter or service.model_name
        self.token_bytes = service.preparer.answers.token_bytes
        self.answers = answers
        self.shared_output: EngineOutput | None = None
        """The output of the shared prefix."""
        self.failure: VLMServeError | None = None
        """The error that ended a stream after its start."""
        self.request = request

    @property
    def usage(self) -> Usage:
        if self.shared_output is not None:
            return self._usage_after(self.shared_output)
        prompts = self.request.prompts
        asked = sum(len(prompt.token_ids) for prompt in prompts)
        generated = sum(answer.num_tokens for answer in self.answers)
        details = PromptTokensDetails(
            # The other samples find the prompt that the first cached.
            cached_tokens=sum(answer.num_cached_tokens for answer in self.answers[:: self.request.num_samples]),
            images=sum(prompt.num_images for prompt in prompts),
            images_encoded=sum(answer.num_images_encoded for answer in self.answers),
            image_tokens=sum(prompt.num_image_tokens for prompt in prompts),
            missed_tokens=self._missed,
        )
        generated_details = CompletionTokensDetails(
            sum(answer.num_reasoning_tokens for answer in self.answers),
            sum(answer.num_accepted_drafts for answer in self.answers),
            sum(answer.num_rejected_drafts for answer in self.answers),
        )
        return Usage(asked, generated, asked + generated, details, generated_details)

    @property
    def _missed(self) -> Missed | msgspec.UnsetType:
        firsts = [self.shared_output, *self.answers[:: self.request.num_samples]]
        known = [one.missed for one in firsts if one is not None and one.missed is not None]
        return sum(known[1:], known[0]) if known else msgspec.UNSET

    def _usage_after(self, shared: EngineOutput) -> Usage:
        """Count a shared prefix once."""
        start, prompts = self.request.shared, self.request.prompts
        assert start is not None
        again = len(prompts) - 1
        asked = sum(len(prompt.token_ids) for prompt in prompts) - again * len(start.token_ids)
        details = PromptTokensDetails(
            cached_tokens=shared.cached_tokens
            + sum(max(0, answer.num_cached_tokens - len(start.token_ids)) for answer in self.answers),
            images=sum(prompt.num_images for prompt in prompts) - again * start.num_images,
            images_encoded=shared.images_encoded + sum(answer.num_images_encoded for answer in self.answers),
            image_tokens=sum(prompt.num_image_tokens for prompt in prompts) - again * start.num_image_tokens,
            missed_tokens=self._missed,
        )
        return Usage(asked, 0, asked, details, CompletionTokensDetails())

    @property
    def may_think(self) -> bool:
        return any(prompt.thoughts is not None for prompt in self.request.prompts)

    @property
    def image_sizes(self) -> list[ImageSize] | msgspec.UnsetType:
        return [size for prompt in self.request.prompts for size in prompt.image_sizes] or msgspec.UNSET

    def summary(self) -> tuple[str, dict[str, str | int]]:
        """Return text and fields for the access log."""
        usage = self.usage
        text = f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, {self.id}"
        fields: dict[str, str | int] = {
            "response_id": self.id,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "images": usage.prompt_tokens_details.images,
        }
        if self.failure is not None:
            text += f", failed: {self.failure}"
            fields["error"], fields["reason"] = error_code(self.failure), str(self.failure)
        return text, fields

    def close(self) -> None:
        for answer in self.answers:
            answer.close()

    def prompt_logprobs(self, index: int) -> list[TokenLogprobs | None]:
        """Prompt logprobs of an answer after its first delta; empty unless requested."""
        prompt, number = divmod(index, self.request.num_answers)
        return self.answers[prompt * self.request.num_samples + number].prompt_logprobs or []

    def results(self) -> list[npt.NDArray[np.float32]]:
        """Values of a task other than `Generate`: one array for each prompt."""
        found = []
        for number, answer in enumerate(self.answers):
            assert answer.result is not None
            task = self.request.task if self.request.tasks is None else self.request.tasks[number]
            values = np.frombuffer(answer.result.data, "<f4")
            if isinstance(task, Embed):
                values = values.reshape(task.shape(len(self.request.prompts[number].token_ids)))
            found.append(values)
        return found

    async def finished(self) -> list[TextDelta]:
        """Return each answer as one delta, in order. Raises VLMServeError.

        With `best_of`: the most likely answers of each prompt, in order of likelihood.
        """
        collected: list[list[TextDelta]] = [[] for _ in self.answers]
        async with contextlib.aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                collected[delta.index].append(delta)
        answers = [_joined(parts) for parts in collected]
        wanted, sampled = self.request.num_answers, self.request.num_samples
        if sampled == wanted:
            return answers
        best: list[TextDelta] = []
        for first in range(0, len(answers), sampled):
            best += sorted(answers[first : first + sampled], key=_likelihood, reverse=True)[:wanted]
        return [replace(answer, index=index) for index, answer in enumerate(best)]

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        if len(self.answers) == 1:
            async with contextlib.aclosing(self.answers[0].deltas()) as deltas:
                async for delta in deltas:
                    yield delta
            return
        # a slow client gets longer deltas, not a longer queue
        queue: asyncio.Queue[TextDelta | Exception] = asyncio.Queue(len(self.answers))
        tasks = [asyncio.ensure_future(_forward(answer, queue)) for answer in self.answers]
        try:
            running = len(tasks)
            while running:
                news = await queue.get()
                if isinstance(news, Exception):
                    raise news
                running -= news.finish_reason is not None
                yield news
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _joined(deltas: Sequence[TextDelta]) -> TextDelta:
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        thought="".join(delta.thought for delta in deltas),
        logprobs=tuple(logprobs for delta in deltas for logprobs in delta.logprobs),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
    )


def _likelihood(answer: TextDelta) -> float:
    return mean_logprob([token.logprobs for token in answer.logprobs])


async def _forward(answer: Answer, queue: asyncio.Queue[TextDelta | Exception]) -> None:
    try:
        async for delta in answer.deltas():
            await queue.put(delta)
    except Exception as error:
        await queue.put(error)


async def start_generation(
    service: Service,
    client: EngineClient,
    request: GenerationRequest,
    generation_id: str,
    arrived: float,
    adapter: str,
    priority: int = 0,
) -> Generation:
    """Submit all answers to the engine, in the order of prompts.

    adapter: "" is the model itself. priority: see `EngineRequest`. Raises the errors of `EngineClient.submit_together`,
    and InvalidRequestError for an invalid grammar.
    """
    request = replace(request, params=service.preparer.answers.with_bad_words(request.params))
    _check_vectors(service, request)
    grammar, tools = request.params.grammar, request.tools
    relaxed = [] if grammar is None else await service.preparation.check_grammar(grammar, tools)
    shown_ids = frozenset() if tools is None else service.preparer.answers.tool_form.shown_ids
    samples = [(prompt, request.params_of(index)) for prompt in request.prompts for index in range(request.num_samples)]
    engine_requests = [
        EngineRequest(
            f"{generation_id}-{number}",
            prompt,
            params,
            request.cache_salt,
            adapter=adapter,
            priority=priority,
            client=sender.get(),
            task=request.task if request.tasks is None else request.tasks[number],
        )
        for number, (prompt, params) in enumerate(samples)
    ]
    shared_output = await _compute_shared(client, request, engine_requests[0])
    streams: Sequence[OutputStream]
    if request.beams is None:
        streams = await client.submit_together(engine_requests)
    else:
        streams = [
            stream
            for root in engine_requests[:: request.num_answers]
            for stream in start_beam_search(client, root, request.beams, request.num_answers, service.max_logprobs)
        ]
    service.metrics.count_request(request.num_answers, request.params.max_tokens)
    answers = [
        Answer(
            number,
            stream,
            service.preparer.answers.text(params, prompt.thoughts, shown_ids),
            AnswerRecord(service.metrics, arrived, len(prompt.token_ids)),
            request,
        )
        for number, (stream, (prompt, params)) in enumerate(zip(streams, samples, strict=True))
    ]
    first_request_ids = [
        sent.request_id for sent in engine_requests[:: 1 if request.beams is None else request.num_answers]
    ]
    generation = Generation(service, request, answers, generation_id, first_request_ids, adapter, relaxed)
    generation.shared_output = shared_output
    return generation


def _check_vectors(service: Service, request: GenerationRequest) -> None:
    task, info, most = request.task, service.client.info, service.config.max_vector_memory
    if not isinstance(task, Embed):
        return
    lengths = [min(len(prompt.token_ids), info.max_prompt_len) for prompt in request.prompts]
    num_bytes = sum(task.num_bytes(length, info.embedding_size) for length in lengths)
    if num_bytes > most:
        raise InvalidRequestError(
            f"the vectors of this request take {num_bytes:,} bytes; {most:,} are allowed (--max-vector-memory): "
            "send fewer inputs, or set dimensions"
        )


async def _compute_shared(
    client: EngineClient, request: GenerationRequest, first: EngineRequest
) -> EngineOutput | None:
    """Compute the prompts' shared prefix, if any. first: a request that will find it cached.

    Raises VLMServeError.
    """
    if request.shared is None:
        return None
    asked = msgspec.structs.replace(
        first, request_id=f"{first.request_id}-shared", prompt=request.shared, task=Prefill()
    )
    [stream] = await client.submit_together([asked])
    try:
        async for output in stream:
            if output.finish_reason in ("abort", "error"):
                raise VLMServeError(output.error or "The engine aborted this request")
            return output
    finally:
        stream.close()
    raise VLMServeError("The engine ended before it computed this request")
