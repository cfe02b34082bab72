"""``POST /v1/chat/completions``: from a body to one answer, or to a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import VLMServeError
from vlmserve.frontend.client import EngineClient, EngineStream
from vlmserve.server.body import read_json_body
from vlmserve.server.connection import EventStream, note, unless_disconnected
from vlmserve.server.errors import error_body, json_response
from vlmserve.server.metrics import AnswerRecord
from vlmserve.server.schema import (
    AnswerChoice,
    AnswerMessage,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChunkChoice,
    Delta,
    PromptTokensDetails,
    Usage,
    parse_chat_request,
)
from vlmserve.server.service import Service, TextStream
from vlmserve.types import MAX_SEED, EngineRequest, Prompt, SamplingParams

_DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new in the answer number `index`. finish_reason: "stop" or "length" with the last piece."""

    index: int
    text: str
    finish_reason: str | None = None


class Answer:
    """One of a request's answers, while it is generated."""

    def __init__(self, index: int, stream: EngineStream, text: TextStream, record: AnswerRecord) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_images_encoded = 0
        self._stream = stream
        self._text = text
        self._record = record

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The text as it comes. Raises VLMServeError if it cannot be finished; closing it aborts the request."""
        try:
            async for output in self._stream:
                self._record.output(output)
                if output.finish_reason in ("abort", "error"):
                    raise VLMServeError(output.error or "The engine gave up on this request")
                self.num_cached_tokens, self.num_images_encoded = output.cached_tokens, output.images_encoded
                self.num_tokens += len(output.token_ids) + (output.stop_token_id is not None)
                text = self._text.push(output.token_ids)
                if output.finish_reason is not None:
                    text += self._text.finish()
                finish_reason = "stop" if self._text.stopped else output.finish_reason
                if finish_reason is not None:
                    self._record.end(finish_reason)
                if text or finish_reason is not None:
                    yield Piece(self.index, text, finish_reason)
                if finish_reason is not None:
                    return
        except VLMServeError:
            self._record.end("error")
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Abort it in the engine unless it has ended."""
        self._stream.close()
        self._record.end("abort")


class Generation:
    """A request under way: its id, its answers, and what they cost."""

    def __init__(self, model: str, prompt: Prompt, answers: Sequence[Answer], completion_id: str) -> None:
        self.id = completion_id
        self.created = int(time.time())
        self.model = model
        self.answers = answers
        self.failure: VLMServeError | None = None
        """What ended a stream that had begun."""
        self._num_prompt_tokens = len(prompt.token_ids)
        self._num_images = prompt.num_images

    @property
    def usage(self) -> Usage:
        generated = sum(answer.num_tokens for answer in self.answers)
        details = PromptTokensDetails(
            # The further answers find the first one's prompt, which says nothing of what was there before.
            cached_tokens=self.answers[0].num_cached_tokens,
            images=self._num_images,
            images_encoded=sum(answer.num_images_encoded for answer in self.answers),
        )
        return Usage(self._num_prompt_tokens, generated, self._num_prompt_tokens + generated, details)

    def __str__(self) -> str:
        usage = self.usage
        failure = f", failed: {self.failure}" if self.failure else ""
        return f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, {self.id}{failure}"

    def close(self) -> None:
        """Abort what has not ended."""
        for answer in self.answers:
            answer.close()

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


async def _forward(answer: Answer, queue: asyncio.Queue[Piece | Exception]) -> None:
    try:
        async for piece in answer.pieces():
            await queue.put(piece)
    except Exception as error:
        await queue.put(error)


async def chat_completions(request: Request) -> Response:
    """The route. Errors before the first byte are HTTP statuses; later ones are the stream's last event."""
    service: Service = request.app.state.service
    service.check_serving()
    with contextlib.ExitStack() as stack:
        with service.bodies.share() as share:
            body = parse_chat_request(await read_json_body(request, service.max_body_bytes, share))
            service.check_model(body.model)
            arrived = time.monotonic()
            await unless_disconnected(request, service.wake())
            client = service.client
            stack.enter_context(service.admit(body.n))
            generation = await unless_disconnected(request, _begin(service, client, body, arrived))
            streams = body.stream
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            del body  # its pictures are prepared, and an answer may take long
        stack.callback(lambda: note(request, str(generation)))
        stack.callback(generation.close)
        if streams:
            return EventStream(_events(generation, include_usage), stack.pop_all())
        return json_response(await unless_disconnected(request, _complete(generation)))


async def _begin(service: Service, client: EngineClient, body: ChatRequest, arrived: float) -> Generation:
    """Prepare the prompt and hand all answers to the engine."""
    started = time.monotonic()
    params = body.sampling_params(service.defaults)
    cache_salt = body.cache_salt or ""
    prompt = await service.prepare(body.conversation(), cache_salt)
    service.metrics.media.observe(time.monotonic() - started)
    completion_id = f"chatcmpl-{uuid.uuid4().hex}"
    all_params = [_params_of(index, params) for index in range(body.n)]
    streams = await client.submit_together(
        [EngineRequest(f"{completion_id}-{index}", prompt, own, cache_salt) for index, own in enumerate(all_params)]
    )
    answers = [
        Answer(index, stream, service.detokenizer(own), AnswerRecord(service.metrics, arrived, len(prompt.token_ids)))
        for index, (stream, own) in enumerate(zip(streams, all_params, strict=True))
    ]
    return Generation(service.model_name, prompt, answers, completion_id)


def _params_of(index: int, params: SamplingParams) -> SamplingParams:
    """The params of answer number `index`: with a seed, every answer gets its own."""
    if params.seed is None or index == 0:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + index) % (MAX_SEED + 1))


async def _complete(generation: Generation) -> ChatCompletion:
    texts = ["" for _ in generation.answers]
    finish_reasons = ["" for _ in generation.answers]
    async with contextlib.aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            texts[piece.index] += piece.text
            finish_reasons[piece.index] = piece.finish_reason or ""
    choices = [
        AnswerChoice(index, AnswerMessage(text), finish_reason)
        for index, (text, finish_reason) in enumerate(zip(texts, finish_reasons, strict=True))
    ]
    return ChatCompletion(generation.id, generation.created, generation.model, choices, generation.usage)


async def _events(generation: Generation, include_usage: bool) -> AsyncGenerator[bytes, None]:
    null_usage = None if include_usage else msgspec.UNSET

    def event(choices: list[ChunkChoice], usage: Usage | msgspec.UnsetType | None = null_usage) -> bytes:
        return _event(ChatChunk(generation.id, generation.created, generation.model, choices, usage))

    try:
        yield b"".join(event([ChunkChoice(answer.index, Delta("assistant", ""))]) for answer in generation.answers)
        async with contextlib.aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                events = b""
                if piece.text:
                    events += event([ChunkChoice(piece.index, Delta(content=piece.text))])
                if piece.finish_reason is not None:
                    events += event([ChunkChoice(piece.index, Delta(), piece.finish_reason)])
                yield events
        if include_usage:
            yield event([], generation.usage)
        yield _DONE
    except VLMServeError as error:
        generation.failure = error
        yield _event(error_body(error))


def _event(value: object) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"
