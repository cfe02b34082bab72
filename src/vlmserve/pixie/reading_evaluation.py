"""How well a model reads: characters, lines, boxes and totals, in fonts and phrasings that training never shows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from vlmserve.pixie.document_drawing import draw_document
from vlmserve.pixie.documents import Document, DocumentKind, Style, sample_document
from vlmserve.pixie.evaluation import TEXT_PARTS, Mistake, TaskResult
from vlmserve.pixie.questions import READING_TASKS
from vlmserve.pixie.reading import TOTAL_NAMES, ReadingQuestion, ask_document
from vlmserve.pixie.scenes import HELD_OUT_SEEDS

if TYPE_CHECKING:
    from PIL import Image

    from vlmserve.offline.llm import LLM

#: The question of each of `READING_TASKS`, and the kinds of documents that it is about.
_ASKED: Final[dict[str, tuple[str, tuple[DocumentKind, ...]]]] = {
    "text": ("read", ("lines", "sign")),
    "receipt": ("receipt", ("receipt",)),
    "total": ("total", ("receipt",)),
    "price": ("price", ("receipt",)),
    "bar": ("bar", ("chart",)),
    "gauge": ("gauge", ("gauge",)),
    "box": ("where", ("lines", "sign")),
}
NO_FONTS: Final = "held-out fonts are not installed; run: pip install 'vlmserve[pixie]'"
#: Minimum intersection of a right box with the true one, over their union.
LEAST_OVERLAP: Final = 0.5
_SEEDS_PER_TASK: Final = 1_000_000
_BATCH: Final = 32
_MAX_TOKENS: Final = 256


def edit_distance(one: str, other: str) -> int:
    """Levenshtein distance, in characters."""
    row = list(range(len(other) + 1))
    for index, character in enumerate(one, start=1):
        above, row[0] = row[0], index
        for place, wanted in enumerate(other, start=1):
            above, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, above + (character != wanted))
    return row[-1]


def overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """The intersection of two boxes over their union, 0 to 1."""

    def area(box: Sequence[float]) -> float:
        return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])

    both = area([max(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2]), min(one[3], other[3])])
    union = area(one) + area(other) - both
    return both / union if union else 0.0


def _count_text(parts: Mapping[str, TaskResult], expected: str, answer: str) -> None:
    given = answer.split("\n")
    for number, line in enumerate(expected.split("\n")):
        parts["line"].asked += 1
        parts["line"].right += number < len(given) and given[number].strip() == line
    parts["character"].asked += len(expected)
    parts["character"].right += max(0, len(expected) - edit_distance(answer, expected))


def held_out_case(task: str, number: int, style: Style) -> tuple[Document, ReadingQuestion]:
    """task: one of `READING_TASKS`. Phrasings are new."""
    first = HELD_OUT_SEEDS + (200 + READING_TASKS.index(task)) * _SEEDS_PER_TASK
    asked, kinds = _ASKED[task]
    rng = random.Random(first + number)
    while True:
        document = sample_document(rng.randrange(first, first + _SEEDS_PER_TASK), rng.choice(kinds), style=style)
        question = ask_document(document, rng, asked, new=True)
        if question is not None:
            return document, question


def is_right(question: ReadingQuestion, answer: str) -> bool:
    """Compare an answer: boxes have to overlap, a receipt needs the right total, other answers are equal."""
    try:
        if question.task == "where":
            return overlap(json.loads(answer), json.loads(question.answer)) >= LEAST_OVERLAP
        if question.task == "receipt":
            return bool(_total(json.loads(answer)) == _total(json.loads(question.answer)))
    except (ValueError, TypeError, LookupError, AttributeError):
        return False
    return answer.strip() == question.answer


def _total(receipt: dict[str, Any]) -> Any:
    return next((value for name, value in receipt.items() if name in TOTAL_NAMES), None)


def evaluate_reading(
    llm: LLM,
    *,
    per_task: int = 200,
    tasks: Sequence[str] = READING_TASKS,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, TaskResult]:
    """Like `evaluation.evaluate`, for `READING_TASKS`; schemas constrain the answers.

    The task ``text`` adds `TEXT_PARTS`.
    """
    from vlmserve.types import Grammar, SamplingParams

    results = {task: TaskResult() for task in tasks}
    parts = {part: TaskResult() for part in TEXT_PARTS}
    cases = [
        (task, number, *held_out_case(task, number, Style(new=True))) for task in tasks for number in range(per_task)
    ]
    for start in range(0, len(cases), _BATCH):
        batch = cases[start : start + _BATCH]
        grammars = [None if one.schema is None else Grammar.json(json.loads(one.schema)) for *_, one in batch]
        params = [SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, grammar=grammar) for grammar in grammars]
        conversations = [messages_about(draw_document(document), one.question) for *_, document, one in batch]
        answers = llm.chat(conversations, params, use_tqdm=False)
        for (task, number, _, question), answer in zip(batch, answers, strict=True):
            output = answer.outputs[0]
            result = results[task]
            result.asked += 1
            result.endless += output.finish_reason == "length"
            if is_right(question, output.text):
                result.right += 1
            else:
                result.mistakes.append(Mistake(number, question.question, question.answer, output.text))
            if task == "text":
                _count_text(parts, question.answer, output.text.strip())
        if progress is not None:
            progress(start + len(batch), len(cases))
    return results | (parts if "text" in tasks else {})


def messages_about(image: Image.Image, question: str) -> list[dict[str, Any]]:
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}]
