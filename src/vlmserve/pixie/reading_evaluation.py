"""How well a model reads: characters, lines, boxes and totals, in fonts and phrasings that training never shows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vlmserve.errors import ConfigurationError
from vlmserve.pixie.document_drawing import draw_document
from vlmserve.pixie.documents import Document, DocumentKind, Style, sample_document
from vlmserve.pixie.evaluation import TaskResult
from vlmserve.pixie.fonts import document_fonts
from vlmserve.pixie.reading import TOTAL_NAMES, ReadingQuestion, ask_document
from vlmserve.pixie.scenes import HELD_OUT_SEEDS

if TYPE_CHECKING:
    from vlmserve.offline.llm import LLM

#: Answers questions about one image each, in order.
AnswerReading = Callable[[Sequence[tuple[Document, ReadingQuestion]]], list[str]]

#: Task of each evaluation and the kinds of documents that it asks about.
EVALUATED: Final[dict[str, tuple[DocumentKind, ...]]] = {
    "read": ("lines", "sign"),
    "receipt": ("receipt",),
    "total": ("receipt",),
    "price": ("receipt",),
    "bar": ("chart",),
    "gauge": ("gauge",),
    "where": ("lines", "sign"),
}
#: Minimum intersection of a right box with the true one, over their union.
LEAST_OVERLAP: Final = 0.5
_SEEDS_PER_TASK: Final = 1_000_000
_BATCH: Final = 32
_MAX_TOKENS: Final = 192


def edit_distance(one: str, other: str) -> int:
    """The least number of characters to insert, delete or replace (Levenshtein)."""
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


@dataclass(slots=True)
class ReadingReport:
    """Exactly right answers by task; of whole texts also lines and characters."""

    tasks: dict[str, TaskResult]
    lines: int = 0
    lines_right: int = 0
    characters: int = 0
    characters_wrong: int = 0

    @property
    def line_accuracy(self) -> float:
        """The fraction of lines that are exactly right, 0 to 1."""
        return self.lines_right / max(1, self.lines)

    @property
    def character_accuracy(self) -> float:
        """1 less the edit distance over the length of the true texts; 0 if less."""
        return max(0.0, 1 - self.characters_wrong / max(1, self.characters))

    def count_text(self, expected: str, answer: str) -> None:
        """Count the lines and characters of a text that was read."""
        given = answer.split("\n")
        for number, line in enumerate(expected.split("\n")):
            self.lines += 1
            self.lines_right += number < len(given) and given[number].strip() == line
        self.characters += len(expected)
        self.characters_wrong += min(len(expected), edit_distance(answer, expected))

    def to_markdown(self) -> str:
        """Return a table with a row for each task, lines and characters."""
        rows = ["| Reading | Questions | Right |", "| --- | ---: | ---: |"]
        rows += [f"| {task} | {result.asked} | {result.accuracy:.1%} |" for task, result in self.tasks.items()]
        rows.append(f"| lines | {self.lines} | {self.line_accuracy:.1%} |")
        rows.append(f"| characters | {self.characters} | {self.character_accuracy:.1%} |")
        return "\n".join(rows)


def held_out_case(task: str, number: int, style: Style) -> tuple[Document, ReadingQuestion]:
    """Sample a document and a question of a task in `EVALUATED`, in new fonts and phrasings."""
    first = HELD_OUT_SEEDS + (200 + tuple(EVALUATED).index(task)) * _SEEDS_PER_TASK
    rng = random.Random(first + number)
    while True:
        document = sample_document(
            rng.randrange(first, first + _SEEDS_PER_TASK), rng.choice(EVALUATED[task]), style=style
        )
        question = ask_document(document, rng, task, new=True)
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
    answer: AnswerReading, *, per_task: int = 100, tasks: Sequence[str] = tuple(EVALUATED), style: Style | None = None
) -> ReadingReport:
    """Ask `per_task` held-out questions of each task.

    style: of the documents; default: new fonts and layouts in usual sizes.
    """
    report = ReadingReport({task: TaskResult() for task in tasks})
    for task in tasks:
        cases = [held_out_case(task, number, style or Style(new=True)) for number in range(per_task)]
        for start in range(0, per_task, _BATCH):
            batch = cases[start : start + _BATCH]
            for (_, question), text in zip(batch, answer(batch), strict=True):
                result = report.tasks[task]
                result.asked += 1
                result.right += is_right(question, text)
                if task == "read":
                    report.count_text(question.answer, text.strip())
    return report


def reading_answers(llm: LLM) -> AnswerReading:
    """Return a function that answers with a model, greedily; schemas constrain the answers."""
    from vlmserve.types import Grammar, SamplingParams

    def answer(cases: Sequence[tuple[Document, ReadingQuestion]]) -> list[str]:
        conversations = [
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": draw_document(document)},
                        {"type": "text", "text": question.question},
                    ],
                }
            ]
            for document, question in cases
        ]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=_MAX_TOKENS,
                grammar=None if question.schema is None else Grammar.json(json.loads(question.schema)),
            )
            for _, question in cases
        ]
        return [result.outputs[0].text for result in llm.chat(conversations, params, use_tqdm=False)]

    return answer


def evaluate_checkpoint(model: Path | str, per_task: int = 100) -> ReadingReport:
    """Evaluate a model in a folder or of a known name. Raises ConfigurationError if fonts are missing."""
    from vlmserve.offline.llm import LLM

    if set(document_fonts(new=True)) & set(document_fonts()):
        raise ConfigurationError("held-out fonts are not installed; run: pip install 'vlmserve[pixie]'")

    return evaluate_reading(reading_answers(LLM(str(model))), per_task=per_task)
