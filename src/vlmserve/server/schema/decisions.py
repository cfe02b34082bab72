"""Questions about one content, in the form of OpenAI's Decisions API."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from vlmserve.frontend.deciding import Parts, answers_as_text
from vlmserve.frontend.deciding import Question as AskedQuestion
from vlmserve.server.schema.asking import ModelRequest
from vlmserve.server.schema.base import ByType, RequestModel, TextOrList
from vlmserve.server.schema.content import PromptRequest
from vlmserve.server.schema.items import MAX_ITEMS, InputFile, InputImage, InputItem, InputText, MessageItem
from vlmserve.server.schema.responses import ResponseUsage

MAX_QUESTIONS = 400
MAX_BRANCHES = 2048
"""Maximum answers that all questions of a request may have together."""
_MAX_JSON = 256 * 1024
_MAX_VALUES = 10_000
_MAX_LEVELS = 32


def _json_as_text(value: Any) -> Any:
    """Write ``input_json`` parts as text. Raises ValueError for JSON over a limit."""
    if not isinstance(value, list):
        return value
    return [_part_as_text(part) for part in value]


def _part_as_text(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") != "input_json":
        return part
    data = part.get("data")
    objects = data if isinstance(data, list) else [data]
    if not all(isinstance(one, dict) for one in objects):
        raise ValueError("data of an input_json must be an object or a list of objects")
    level, values = [data], 1
    for _ in range(_MAX_LEVELS + 1):
        inner = [one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer or ())]
        values += len(inner)
        level = [one for one in inner if isinstance(one, dict | list)]
        if not level:
            break
    text = "" if level else json.dumps(data, ensure_ascii=False)
    if level or values > _MAX_VALUES or len(text.encode(errors="replace")) > _MAX_JSON:
        raise ValueError(
            f"data of an input_json may have {_MAX_LEVELS} levels, {_MAX_VALUES:,} values and {_MAX_JSON // 1024} KiB"
        )
    return {"type": "input_text", "text": text}


def _as_items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [
        {**item, "content": _json_as_text(item["content"])} if isinstance(item, dict) and "content" in item else item
        for item in value
    ]


_Part = Annotated[InputText | InputImage | InputFile, ByType()]


class _Question(RequestModel):
    name: str | None = None
    instructions: Annotated[
        Annotated[str, Field(min_length=1)] | Annotated[list[_Part], Field(min_length=1)],
        TextOrList("parts"),
        BeforeValidator(_json_as_text),
    ]

    @property
    def item(self) -> MessageItem:
        content = self.instructions
        return MessageItem(role="user", content=content if isinstance(content, str) else list(content))

    def asked(self, parts: Parts) -> AskedQuestion:
        """The question for the model. parts: of the instructions."""
        raise NotImplementedError

    @property
    def num_answers(self) -> int:
        raise NotImplementedError


class Predicate(_Question):
    """A statement that is true or false."""

    type: Literal["predicate"]

    def asked(self, parts: Parts) -> AskedQuestion:
        return AskedQuestion.predicate(parts)

    @property
    def num_answers(self) -> int:
        return 2


class ChoiceOption(RequestModel):
    value: str | bool
    description: str | None = None


class Choice(_Question):
    """A choice from several values."""

    type: Literal["choice"]
    choices: Annotated[list[ChoiceOption], Field(min_length=2, max_length=255)]

    @model_validator(mode="after")
    def _are_unique(self) -> Self:
        if len({(type(one.value), one.value) for one in self.choices}) < len(self.choices):
            raise ValueError("choices must be unique")
        if "" in [one.value for one in self.choices]:
            raise ValueError("choices must not be empty")
        return self

    def asked(self, parts: Parts) -> AskedQuestion:
        texts = answers_as_text([one.value for one in self.choices])
        return AskedQuestion.choice(parts, texts, [one.description for one in self.choices])

    @property
    def num_answers(self) -> int:
        return len(self.choices)


class Level(RequestModel):
    label: Annotated[str, Field(min_length=1)]
    description: str | None = None


class Score(_Question):
    """A rating on a scale, lowest level first."""

    type: Literal["score"]
    levels: Annotated[list[Level], Field(min_length=2, max_length=10)]

    @model_validator(mode="after")
    def _are_unique(self) -> Self:
        if len({one.label for one in self.levels}) < len(self.levels):
            raise ValueError("labels of levels must be unique")
        return self

    def asked(self, parts: Parts) -> AskedQuestion:
        about = [one.description for one in self.levels]
        return AskedQuestion.score(parts, [one.label for one in self.levels], about)

    @property
    def num_answers(self) -> int:
        return len(self.levels)


Question = Annotated[Predicate | Choice | Score, ByType()]


class DecisionRequest(PromptRequest, ModelRequest):
    """The body of ``POST /v1/decisions``."""

    content_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS), BeforeValidator(_as_items)]
    questions: Annotated[list[Question], Field(min_length=1, max_length=MAX_QUESTIONS)]

    @property
    def num_branches(self) -> int:
        return sum(question.num_answers for question in self.questions)

    @model_validator(mode="after")
    def _has_few_branches(self) -> Self:
        if self.num_branches > MAX_BRANCHES:
            raise ValueError(
                f"The questions have {self.num_branches:,} answers together; at most {MAX_BRANCHES:,} are allowed"
            )
        return self


class PredicateAnswer(msgspec.Struct):
    """The answer to a predicate. probability: of being true."""

    name: str | None
    probability: float
    type: str = "predicate"


class ValueProbability(msgspec.Struct):
    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct):
    """The most probable choice, and the probabilities of all."""

    name: str | None
    choice: str | bool
    probabilities: list[ValueProbability]
    confidence: float
    type: str = "choice"


class LevelProbability(msgspec.Struct):
    """The probability of a level. value: its index, from 0."""

    value: int
    label: str
    probability: float


class ScoreAnswer(msgspec.Struct):
    """The answer to a score. score: the mean of the levels' indices, weighted by probability."""

    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float
    type: str = "score"


class Decision(msgspec.Struct):
    """The response, with answers in the order of the questions."""

    model: str
    answers: list[Any]
    """Each is a `PredicateAnswer`, `ChoiceAnswer` or `ScoreAnswer`."""
    usage: ResponseUsage
