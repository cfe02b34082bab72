"""Exact-match accuracy of pixie on held-out images, by task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vlmserve.pixie.drawing import draw_scene
from vlmserve.pixie.questions import FORM_TASKS, READING_TASKS, TASKS, Example, sample_example
from vlmserve.pixie.scenes import HELD_OUT_SEEDS

if TYPE_CHECKING:
    from vlmserve.offline.llm import LLM

#: Answers conversations (lists of messages in OpenAI's format), in order.
Answer = Callable[[list[list[dict[str, Any]]]], list[str]]

#: Distance between the first held-out seeds of consecutive tasks.
_SEEDS_PER_TASK: Final = 1_000_000
#: Conversations in one call, whose images are in memory together.
_BATCH: Final = 64
#: Twice the length of the longest right answer.
_MAX_TOKENS: Final = 96

#: Right lines and characters of the task ``text``; characters by edit distance.
TEXT_PARTS: Final[tuple[str, ...]] = ("line", "character")

_KINDS: Final[dict[str, str]] = {
    **TASKS,
    **dict.fromkeys(FORM_TASKS, "form"),
    **dict.fromkeys(READING_TASKS, "reading"),
    **dict.fromkeys(TEXT_PARTS, "text"),
}

_BEGIN, _END = "<!-- evaluation: begin -->", "<!-- evaluation: end -->"


def messages_of(example: Example, turn: int = 0) -> list[dict[str, Any]]:
    """Return the conversation up to the question of ``turn``, with right answers to earlier questions.

    Image parts are ``{"type": "image", "image": PIL.Image.Image}``.
    """
    messages: list[dict[str, Any]] = []
    if example.system is not None:
        messages.append({"role": "system", "content": example.system})
    for number, (question, answer) in enumerate(example.turns[: turn + 1]):
        content: str | list[dict[str, Any]] = question
        if number == 0 and example.scenes:
            images = [{"type": "image", "image": draw_scene(scene)} for scene in example.scenes]
            text = {"type": "text", "text": question}
            content = [text, *images] if example.text_first else [*images, text]
        messages.append({"role": "user", "content": content})
        if number < turn:
            messages.append({"role": "assistant", "content": answer})
    return messages


@dataclass(frozen=True, slots=True)
class Mistake:
    """A wrong answer. seed: reproduces the example (`sample_example`)."""

    seed: int
    question: str
    expected: str
    answer: str


@dataclass(slots=True)
class TaskResult:
    """Numbers of questions and exactly right answers of a task, and its wrong answers."""

    asked: int = 0
    right: int = 0
    mistakes: list[Mistake] = field(default_factory=list)
    endless: int = 0
    """Answers that did not end by themselves."""

    @property
    def accuracy(self) -> float:
        """The fraction of exactly right answers, 0 to 1."""
        return self.right / self.asked if self.asked else 0.0


@dataclass(slots=True)
class Report:
    """The results of all tasks, in the order of `TASKS`, `FORM_TASKS`, `READING_TASKS` and `TEXT_PARTS`."""

    tasks: dict[str, TaskResult]

    def mean(self, kind: str) -> float:
        """kind: such as ``"core"`` or ``"reading"``. Returns 0 to 1."""
        accuracies = [result.accuracy for task, result in self.tasks.items() if _KINDS[task] == kind]
        return sum(accuracies) / len(accuracies) if accuracies else 0.0

    def to_markdown(self) -> str:
        """Return a table with a row for each task, and the means."""
        lines = ["| Task | Kind | Questions | Exactly right |", "| --- | --- | ---: | ---: |"]
        for task, result in self.tasks.items():
            lines.append(f"| {task} | {_KINDS[task]} | {result.asked} | {result.accuracy:.1%} |")
        for kind in dict.fromkeys(kind for task, kind in _KINDS.items() if task not in TEXT_PARTS):
            asked = sum(result.asked for task, result in self.tasks.items() if _KINDS[task] == kind)
            if not asked:
                continue
            lines.append(f"| **mean** | {kind} | {asked} | **{self.mean(kind):.1%}** |")
        return "\n".join(lines)


def _cases(tasks: Sequence[str], per_task: int) -> Iterator[tuple[str, int, Example, int]]:
    for number, task in enumerate(TASKS):
        if task not in tasks:
            continue
        for index in range(per_task):
            seed = HELD_OUT_SEEDS + number * _SEEDS_PER_TASK + index
            example = sample_example(seed, task, listed_words=True)
            for turn in range(len(example.turns)):
                yield task, seed, example, turn


def evaluate(
    answer: Answer,
    *,
    per_task: int = 200,
    tasks: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Ask `per_task` held-out examples of each task, and compare the stripped answers exactly.

    Every turn of a follow-up counts as a question, after right answers to the earlier ones. progress: called with the
    numbers of answered and all questions.

    Raises ValueError for an unknown task, or if `answer` does not return one answer for each conversation.
    """
    tasks = tuple(TASKS) if tasks is None else tuple(tasks)
    if unknown := set(tasks) - set(TASKS):
        raise ValueError(f"unknown tasks: {', '.join(sorted(unknown))}; known are {', '.join(TASKS)}")
    cases = list(_cases(tasks, per_task))
    report = Report({task: TaskResult() for task in TASKS if task in tasks})
    for start in range(0, len(cases), _BATCH):
        batch = cases[start : start + _BATCH]
        answers = answer([messages_of(example, turn) for _, _, example, turn in batch])
        if len(answers) != len(batch):
            raise ValueError(f"{len(batch)} conversations got {len(answers)} answers")
        for (task, seed, example, turn), text in zip(batch, answers, strict=True):
            question, expected = example.turns[turn]
            result = report.tasks[task]
            result.asked += 1
            if text.strip() == expected:
                result.right += 1
            else:
                result.mistakes.append(Mistake(seed, question, expected, text))
        if progress is not None:
            progress(start + len(batch), len(cases))
    return report


def greedy_answers(llm: LLM) -> Answer:
    from vlmserve.types import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS)

    def answer(conversations: list[list[dict[str, Any]]]) -> list[str]:
        return [result.outputs[0].text for result in llm.chat(conversations, params, use_tqdm=False)]

    return answer


def write_card(path: Path, report: Report) -> None:
    """Replace the evaluation table between the markers of a model card. Raises ValueError without markers."""
    card = path.read_text(encoding="utf-8")
    before, begin, rest = card.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {_BEGIN!r} and {_END!r} to write the table between")
    path.write_text(f"{before}{begin}\n{report.to_markdown()}\n{end}{after}", encoding="utf-8")
