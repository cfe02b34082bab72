"""``POST /v1/decisions``: probabilities of the answers to questions about one content."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.conversations import ConversationOptions, thinking_settings
from vlmserve.frontend.deciding import Decider, Parts, confidence, probabilities, with_shared
from vlmserve.frontend.deciding import Question as AskedQuestion
from vlmserve.frontend.media_preparer import KnownMedia
from vlmserve.server.body import BodyShare
from vlmserve.server.generation import Generation, GenerationRequest
from vlmserve.server.history import Message, owner_of, with_files
from vlmserve.server.routes.answering import Dialect, answer
from vlmserve.server.schema.decisions import (
    Choice,
    ChoiceAnswer,
    Decision,
    DecisionRequest,
    LevelProbability,
    Predicate,
    PredicateAnswer,
    Question,
    ScoreAnswer,
    ValueProbability,
)
from vlmserve.server.schema.responses import ResponseUsage
from vlmserve.server.service import Service
from vlmserve.server.turns import Turns
from vlmserve.types import Prompt, SamplingParams


class DecisionDialect(Dialect[DecisionRequest]):
    """OpenAI's decisions. The content before all questions is computed once."""

    kind = DecisionRequest
    id_prefix = "dec-"
    operation = "decisions"
    content_field = "input"

    def __init__(self, owner: str = "") -> None:
        self._owner = owner
        self._temperature = 1.0

    def num_answers(self, body: DecisionRequest) -> int:
        return body.num_branches

    async def ask(self, service: Service, body: DecisionRequest) -> GenerationRequest:
        decider = await service.preparation.text(Decider, 0)
        self._temperature = decider.temperature
        turns = Turns(None, [], [item.stored() for item in body.input])
        with service.bodies.share() as share:
            content = await self._content(service, turns, share)
            questions = [one.asked(_instructions(one)) for one in body.questions]
            shared, prompts = with_shared(await self._prompts(service, body, turns, content, questions))
        size = sum(len(answer) for question in questions for answer in question.answers)
        tasks = await service.preparation.text(lambda _: [decider.task(one.answers) for one in questions], size)
        return GenerationRequest(
            prompts, SamplingParams(), cache_salt=body.cache_salt or "", tasks=tasks, shared=shared
        )

    async def _content(self, service: Service, turns: Turns, share: BodyShare) -> list[Message]:
        """The messages before a question, with files and fetched images in place.

        Raises VLMServeError, naming the item.
        """
        try:
            messages = await with_files(service, self._owner, turns.messages, share)
            return await _with_fetched(service, messages, share)
        except InvalidRequestError as error:
            turns.reword(error)
            raise

    async def _prompts(
        self,
        service: Service,
        body: DecisionRequest,
        turns: Turns,
        content: Sequence[Message],
        questions: Sequence[AskedQuestion],
    ) -> list[Prompt]:
        """Raises VLMServeError, naming the question or the item."""
        known: KnownMedia = {}
        conversations = [one.after(content) for one in questions]
        options: ConversationOptions = {
            "cache_salt": body.cache_salt or "",
            "template_settings": thinking_settings(False, service.preparer.template_settings),
            "mm_processor_kwargs": body.processor_kwargs,
        }

        async def alone(number: int) -> Prompt:
            try:
                with service.bodies.share() as share:
                    messages = await with_files(service, self._owner, conversations[number], share)
                    return await service.preparation.prepare(messages, known, **options)
            except InvalidRequestError as error:
                raise _about(error, number, questions[number], conversations[number], turns) from error

        prompts = {0: await alone(0)}  # prepares the shared media
        known_media = _has_at_most_images(content)
        alike = [number for number in range(1, len(questions)) if _adds_text(questions[number])] if known_media else []
        made = await service.preparation.prepare_alike([conversations[number] for number in alike], known, **options)
        for number, prompt in zip(alike, made, strict=True):
            if isinstance(prompt, InvalidRequestError):
                raise _about(prompt, number, questions[number], conversations[number], turns)
            if prompt is not None:
                prompts[number] = prompt
        others = [number for number in range(len(questions)) if number not in prompts]
        prompts |= zip(others, await asyncio.gather(*map(alone, others)), strict=True)
        return [prompts[number] for number in range(len(questions))]

    async def complete(self, body: DecisionRequest, generation: Generation) -> Decision:
        await generation.finished()
        answers = [
            _answer(one, probabilities(result, self._temperature))
            for one, result in zip(body.questions, generation.results(), strict=True)
        ]
        return Decision(generation.model, answers, ResponseUsage.of(generation.usage))


def _instructions(question: Question) -> Parts:
    [message] = Turns(None, [], [question.item.stored()]).messages
    said = message["content"]
    return [{"type": "text", "text": said}] if isinstance(said, str) else list(said)


async def _with_fetched(service: Service, messages: Sequence[Message], share: BodyShare) -> list[Message]:
    """Replace http(s) URLs of images by data URLs. Raises ImageFetchError."""
    urls: dict[str, str] = {}

    async def fetched(part: dict[str, Any], place: str) -> dict[str, Any]:
        if part["type"] != "image_url" or not (url := part["image_url"]["url"]).lower().startswith(("http:", "https:")):
            return part
        if url not in urls:
            try:
                data = await service.preparation.fetch(url, service.media)
            except InvalidRequestError as error:
                error.param = place
                raise
            share.need(len(data) * 4 // 3)
            urls[url] = f"data:image/x;base64,{base64.b64encode(data).decode()}"
        return {**part, "image_url": {**part["image_url"], "url": urls[url]}}

    shown: list[Message] = []
    for index, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, list):
            content = [
                await fetched(part, f"messages[{index}].content[{number}].image_url.url")
                for number, part in enumerate(content)
            ]
        shown.append({**message, "content": content})
    return shown


def _has_at_most_images(messages: Sequence[Message]) -> bool:
    """Return whether there are only text and images, which one question prepares for all."""
    shown = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return all(part["type"] in ("text", "image_url") for part in shown)


def _adds_text(question: AskedQuestion) -> bool:
    return all(part["type"] == "text" for part in question.parts)


def _about(
    error: InvalidRequestError,
    number: int,
    question: AskedQuestion,
    messages: Sequence[Message],
    turns: Turns,
) -> InvalidRequestError:
    """Let an error name the question, whose parts end the last message, or else the item."""
    last = messages[-1]["content"]
    start = len(last) - len(question.parts) - (not question.rule_first) if isinstance(last, list) else 0
    found = re.match(r"messages\[(\d+)\]\.content\[(\d+)\]", error.param or "")
    if found is not None and int(found[1]) == len(messages) - 1 and int(found[2]) >= start:
        place = f"questions[{number}].instructions[{int(found[2]) - start}]"
        error.args = (str(error).replace(found[0], place).replace(".image_url.url", ".image_url"),)
        error.param = place
    turns.reword(error)
    return error


def _answer(question: Question, values: list[float]) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    if isinstance(question, Predicate):
        return PredicateAnswer(question.name, values[0])
    if isinstance(question, Choice):
        shown = [ValueProbability(one.value, value) for one, value in zip(question.choices, values, strict=True)]
        best = max(shown, key=lambda one: one.probability)
        return ChoiceAnswer(question.name, best.value, shown, confidence(values))
    levels = [
        LevelProbability(place, one.label, value)
        for place, (one, value) in enumerate(zip(question.levels, values, strict=True))
    ]
    mean = sum(one.value * one.probability for one in levels)
    return ScoreAnswer(question.name, mean, levels, confidence(values))


async def decisions(request: Request) -> Response:
    """Return probabilities of the answers to questions about one content."""
    return await answer(request, DecisionDialect(owner_of(request)))
