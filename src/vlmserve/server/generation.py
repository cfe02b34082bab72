"""Answers under way: from prompts to pieces of text, and what they cost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from vlmserve.errors import InvalidRequestError, VLMServeError
from vlmserve.frontend.beams import BeamSearch, first_request_id, start_beam_search
from vlmserve.frontend.client import EngineClient
from vlmserve.frontend.tools import ToolUse
from vlmserve.server.errors import error_code
from vlmserve.server.metrics import AnswerRecord
from vlmserve.server.schema.usage import PromptTokensDetails, Usage
from vlmserve.server.service import Service, TextStream
from vlmserve.types import (
    EngineOutput,
    EngineRequest,
    Prompt,
    RequestTimings,
    SamplingParams,
    TokenLogprobs,
    mean_logprob,
)


@dataclass(frozen=True, slots=True)
class Question:
    """What a request asks for: `num_answers` answers to each prompt, found by a search if there are beams.

    tools: what they may call. num_samples: answers to each prompt that are generated; `num_answers`, or more if these
    are to be the likeliest of them.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    num_answers: int = 1
    cache_salt: str = ""
    beams: BeamSearch | None = None
    tools: ToolUse | None = None
    num_samples: int = 1

    def params_of(self, index: int) -> SamplingParams:
        """The params of sample number `index`: with a seed every one gets its own, and to choose from several it has to
        be told how likely they are."""
        return self.params.of_sample(index, ranked=self.num_samples > self.num_answers)


class Told(NamedTuple):
    """How likely a token of an answer was. offset: the answer's characters before it."""

    logprobs: TokenLogprobs
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new in the answer number `index`. finish_reason: "stop" or "length" with the last piece;
    stop_string: the one that ended it. told: of the tokens that `text` comes from, if that is asked for."""

    index: int
    text: str
    finish_reason: str | None = None
    stop_string: str | None = None
    told: tuple[Told, ...] = ()


class OutputStream(Protocol):
    """Where the outputs of an answer come from, in order. Closing it aborts the answer."""

    def __aiter__(self) -> AsyncIterator[EngineOutput]: ...

    def close(self) -> None: ...


class Answer:
    """One of a request's answers, while it is generated."""

    def __init__(self, index: int, stream: OutputStream, text: TextStream, record: AnswerRecord) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_images_encoded = 0
        self.finish_reason: str | None = None
        """How it ended; None while it goes on, and if it was cut off."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        """Of the prompt's tokens, if they are asked for, from the first piece on."""
        self._held: deque[Told] = deque()
        self._stream = stream
        self._text = text
        self._record = record

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The text as it comes. Raises VLMServeError if it cannot be finished; closing it aborts the request."""
        try:
            async for output in self._stream:
                self._record.output(output)
                if output.finish_reason in ("abort", "error"):
                    message = output.error or "The engine gave up on this request"
                    if output.error_param is not None:
                        raise InvalidRequestError(message, param=output.error_param)
                    raise VLMServeError(message)
                self.num_cached_tokens, self.num_images_encoded = output.cached_tokens, output.images_encoded
                self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
                text = self._push(output)
                stop_string = self._text.stop_string
                ended = output.stop_token_id is not None and stop_string is None
                self.num_tokens = self._text.num_tokens + ended
                finish_reason = "stop" if stop_string is not None else output.finish_reason
                if finish_reason is not None:
                    self.finish_reason = finish_reason
                    self._record.end(finish_reason)
                if text or finish_reason is not None:
                    yield Piece(self.index, text, finish_reason, stop_string, self._shown(finish_reason))
                if finish_reason is not None:
                    return
        except VLMServeError:
            self._record.end("error")
            raise
        finally:
            self.close()

    @property
    def timings(self) -> RequestTimings | None:
        """Where its time went until now; None before its first token."""
        return self._record.timings

    @property
    def ttft(self) -> float | None:
        """Seconds from the request's arrival to its first token; None before that."""
        return self._record.ttft

    def _push(self, output: EngineOutput) -> str:
        """The text that can be shown now."""
        if output.logprobs is None:
            text = self._text.push(output.token_ids)
        else:
            text = ""
            for token_id, logprobs in zip(output.token_ids, output.logprobs, strict=True):
                self._held.append(Told(logprobs, self._text.num_decoded))
                text += self._text.push([token_id])
        return text if output.finish_reason is None else text + self._text.finish()

    def _shown(self, finish_reason: str | None) -> tuple[Told, ...]:
        """What is told with the text so far and was not before. Of a stop string's tokens nothing is told."""
        if finish_reason is not None and self._text.stop_string is None:
            count = len(self._held)
        else:
            count = sum(told.offset < self._text.num_shown for told in self._held)
        return tuple(self._held.popleft() for _ in range(count))

    def close(self) -> None:
        """Abort it in the engine unless it has ended."""
        self._stream.close()
        self._record.end("abort")


class Generation:
    """A request under way: its id, its answers, and what they cost. answers: all that are generated, prompt by prompt.
    firsts: the ids of the requests that the engine was given in the beginning."""

    def __init__(
        self,
        service: Service,
        question: Question,
        answers: Sequence[Answer],
        generation_id: str,
        firsts: Sequence[str],
    ) -> None:
        self.id = generation_id
        self.firsts = firsts
        self.created = int(time.time())
        self.model = service.model_name
        self.token_bytes = service.preparer.token_bytes
        self.answers = answers
        self.failure: VLMServeError | None = None
        """What ended a stream that had begun."""
        self.question = question

    @property
    def usage(self) -> Usage:
        prompts = self.question.prompts
        asked = sum(len(prompt.token_ids) for prompt in prompts)
        generated = sum(answer.num_tokens for answer in self.answers)
        details = PromptTokensDetails(
            # The further answers find the first one's prompt, which says nothing of what was there before.
            cached_tokens=sum(answer.num_cached_tokens for answer in self.answers[:: self.question.num_samples]),
            images=sum(prompt.num_images for prompt in prompts),
            images_encoded=sum(answer.num_images_encoded for answer in self.answers),
        )
        return Usage(asked, generated, asked + generated, details)

    def summary(self) -> tuple[str, dict[str, str | int]]:
        """What its line in the access log says of it, as text and as fields."""
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
            fields["error"] = error_code(self.failure)
        return text, fields

    def close(self) -> None:
        """Abort what has not ended."""
        for answer in self.answers:
            answer.close()

    def prompt_logprobs(self, index: int) -> list[TokenLogprobs | None]:
        """Of the tokens of the prompt to which answer number `index` is, once it has begun; empty if they are not asked
        for."""
        prompt, number = divmod(index, self.question.num_answers)
        return self.answers[prompt * self.question.num_samples + number].prompt_logprobs or []

    async def finished(self) -> list[Piece]:
        """All answers that are wanted, each as one piece, when the last of them has ended: in order, or where there are
        more to choose from, those to each prompt by how likely they are. Raises VLMServeError."""
        collected: list[list[Piece]] = [[] for _ in self.answers]
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                collected[piece.index].append(piece)
        answers = [_joined(parts) for parts in collected]
        wanted, sampled = self.question.num_answers, self.question.num_samples
        if sampled == wanted:
            return answers
        best: list[Piece] = []
        for first in range(0, len(answers), sampled):
            best += sorted(answers[first : first + sampled], key=_likelihood, reverse=True)[:wanted]
        return [replace(answer, index=index) for index, answer in enumerate(best)]

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The pieces of all answers as they come."""
        if len(self.answers) == 1:
            async with contextlib.aclosing(self.answers[0].pieces()) as pieces:
                async for piece in pieces:
                    yield piece
            return
        # Bounded, so that a slow client makes the pieces longer and not the queue.
        queue: asyncio.Queue[Piece | Exception] = asyncio.Queue(len(self.answers))
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


def _joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of an answer as one."""
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        told=tuple(told for piece in pieces for told in piece.told),
    )


def _likelihood(answer: Piece) -> float:
    return mean_logprob([told.logprobs for told in answer.told])


async def _forward(answer: Answer, queue: asyncio.Queue[Piece | Exception]) -> None:
    try:
        async for piece in answer.pieces():
            await queue.put(piece)
    except Exception as error:
        await queue.put(error)


async def begin(
    service: Service, client: EngineClient, question: Question, generation_id: str, arrived: float
) -> Generation:
    """Hand all answers to the engine, those to the first prompt first. Raises what `EngineClient.submit` does, and
    InvalidRequestError for a broken grammar."""
    grammar, tools = question.params.grammar, question.tools
    if grammar is not None:
        await service.check_grammar(grammar, tools)
    shown_ids = frozenset() if tools is None else service.preparer.tool_form.shown_ids
    asked = [
        (prompt, question.params_of(index)) for prompt in question.prompts for index in range(question.num_samples)
    ]
    requests = [
        EngineRequest(f"{generation_id}-{number}", prompt, params, question.cache_salt)
        for number, (prompt, params) in enumerate(asked)
    ]
    streams: Sequence[OutputStream]
    if question.beams is None:
        streams = await client.submit_together(requests)
    else:
        streams = [
            stream
            for request in requests[:: question.num_answers]
            for stream in start_beam_search(client, request, question.beams, question.num_answers, service.max_logprobs)
        ]
    service.metrics.count_question(question.num_answers, question.params.max_tokens)
    answers = [
        Answer(
            number,
            stream,
            service.detokenizer(params, shown_ids),
            AnswerRecord(service.metrics, arrived, len(prompt.token_ids)),
        )
        for number, (stream, (prompt, params)) in enumerate(zip(streams, asked, strict=True))
    ]
    firsts = [
        request.request_id if question.beams is None else first_request_id(request.request_id)
        for request in requests[:: 1 if question.beams is None else question.num_answers]
    ]
    return Generation(service, question, answers, generation_id, firsts)
