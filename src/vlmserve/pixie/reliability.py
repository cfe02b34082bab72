"""Calibration of decisions about drawn images with known answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from vlmserve.frontend.deciding import Question
from vlmserve.pixie.drawing import draw_scene
from vlmserve.pixie.questions import sample_example
from vlmserve.pixie.scenes import HELD_OUT_SEEDS
from vlmserve.pixie.vocabulary import COLOURS, PLACES, SHAPES

if TYPE_CHECKING:
    from vlmserve.offline.llm import LLM

#: Pixie's tasks with a fixed set of answers.
TASKS: Final = ("exists", "attribute", "where", "count")
#: Bins of equal width by the probability of the most probable answer.
BINS: Final = 10
#: The range in which a temperature is searched.
_RANGE: Final = (0.05, 20.0)
_LEVELS: Final = tuple(map(str, range(10)))
#: Columns of a report.
HEADINGS: Final = ("Task", "Questions", "Accuracy", "ECE", "ECE, fitted")

#: Gets a conversation and a question about it; returns the probability of each answer.
Decide = Callable[[list[dict[str, Any]], Question], list[float]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The probabilities of a question's answers. right: index of the right answer."""

    task: str
    probabilities: tuple[float, ...]
    right: int


def outcomes(decide: Decide, per_task: int, advance: Callable[[], None] = lambda: None) -> list[Outcome]:
    """Ask about held-out images. per_task: examples of each of `TASKS`. advance: called after each."""
    found = []
    for task in TASKS:
        for seed in range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + per_task):
            example = sample_example(seed, task)
            text, answer = example.turns[0]
            question = _question(text, answer)
            if example.task == task and question is not None:
                images = [{"type": "image", "image": draw_scene(scene)} for scene in example.scenes]
                values = decide([{"role": "user", "content": images}], question)
                found.append(Outcome(task, tuple(values), _place(question, answer)))
            advance()
    return found


def _question(text: str, answer: str) -> Question | None:
    """None if the answers are not a fixed set."""
    if answer in ("yes", "no"):
        return Question.predicate(f'The answer to this question is yes: "{text}"')
    if answer in _LEVELS:
        return Question.score(text, _LEVELS)
    return next((Question.choice(text, names) for names in (COLOURS, SHAPES, PLACES) if answer in names), None)


def _place(question: Question, answer: str) -> int:
    return ("yes", "no").index(answer) if answer in ("yes", "no") else question.answers.index(answer)


def at_temperature(probabilities: Sequence[float], temperature: float) -> npt.NDArray[np.float64]:
    """Divides log-probabilities, then normalizes."""
    logs = np.log(np.maximum(probabilities, 1e-300)) / temperature
    weights = np.exp(logs - logs.max())
    scaled: npt.NDArray[np.float64] = weights / weights.sum()
    return scaled


def accuracy(found: Sequence[Outcome]) -> float:
    return float(np.mean([int(np.argmax(one.probabilities)) == one.right for one in found]))


def loss(found: Sequence[Outcome], temperature: float) -> float:
    """The mean negative log-probability of right answers, in nats."""
    values = [at_temperature(one.probabilities, temperature)[one.right] for one in found]
    return float(-np.log(np.maximum(values, 1e-300)).mean())


@dataclass(frozen=True, slots=True)
class Bin:
    """Answers of similar probability."""

    count: int
    confidence: float
    """Their mean probability."""
    accuracy: float


def bins(found: Sequence[Outcome], temperature: float = 1.0) -> list[Bin]:
    """Sort the most probable answers into `BINS` bins, without empty ones."""
    scaled = [at_temperature(one.probabilities, temperature) for one in found]
    tops = np.array([one.max() for one in scaled])
    right = np.array([int(one.argmax()) == outcome.right for one, outcome in zip(scaled, found, strict=True)])
    places = np.minimum((tops * BINS).astype(int), BINS - 1)
    return [
        Bin(int(own.sum()), float(tops[own].mean()), float(right[own].mean()))
        for own in (places == place for place in range(BINS))
        if own.any()
    ]


def calibration_error(found: Sequence[Outcome], temperature: float = 1.0) -> float:
    """The expected calibration error (https://arxiv.org/abs/1706.04599), from 0 to 1."""
    return sum(one.count * abs(one.confidence - one.accuracy) for one in bins(found, temperature)) / len(found)


def fitted_temperature(found: Sequence[Outcome]) -> float:
    """The temperature with the lowest `loss`, by golden-section search."""
    shrink = (math.sqrt(5) - 1) / 2
    low, high = (math.log(end) for end in _RANGE)
    while high - low > 1e-3:
        left, right = high - shrink * (high - low), low + shrink * (high - low)
        if loss(found, math.exp(left)) < loss(found, math.exp(right)):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A temperature fitted to half of the outcomes, and the other half to check it."""

    fitted: list[Outcome]
    checked: list[Outcome]
    temperature: float

    @classmethod
    def of(cls, found: Sequence[Outcome]) -> Calibration:
        """found: at least two outcomes."""
        return cls([*found[::2]], [*found[1::2]], fitted_temperature(found[::2]))

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Cells by `HEADINGS`: a row for each task, and one for all checked outcomes."""
        rows = [self._row(task, own) for task, own in self._by_task() if own]
        return [*rows, self._row("all", self.checked)]

    def to_markdown(self) -> str:
        lines = [
            f"| {' | '.join(HEADINGS)} |",
            "| --- | ---: | ---: | ---: | ---: |",
            *(f"| {' | '.join(row)} |" for row in self.rows),
        ]
        return "\n".join([*lines, "", f"Temperature: {self.temperature:.3f}"])

    def _by_task(self) -> Iterator[tuple[str, list[Outcome]]]:
        for task in TASKS:
            yield task, [one for one in self.checked if one.task == task]

    def _row(self, name: str, found: list[Outcome]) -> tuple[str, ...]:
        errors = [calibration_error(found, temperature) for temperature in (1.0, self.temperature)]
        return name, str(len(found)), f"{accuracy(found):.1%}", *(f"{error:.3f}" for error in errors)


def decisions_of(llm: LLM) -> Decide:
    """Return a function that asks a model, without its stored temperature."""

    def decide(messages: list[dict[str, Any]], question: Question) -> list[float]:
        [values] = llm.decide(messages, [question], temperature=1.0, use_tqdm=False)
        return list(values)

    return decide
