"""Evaluation with answerers that are known to be right or wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import vlmserve.pixie
from vlmserve.pixie.evaluation import Report, TaskResult, evaluate, messages_of, write_card
from vlmserve.pixie.questions import TASKS, Example, sample_example
from vlmserve.pixie.scenes import HELD_OUT_SEEDS, sample_scene

CARD = Path(vlmserve.pixie.__file__).parent / "model" / "README.md"

Conversations = list[list[dict[str, Any]]]


def question_of(conversation: list[dict[str, Any]]) -> str:
    content = conversation[-1]["content"]
    if isinstance(content, str):
        return content
    return str(next(part["text"] for part in content if part["type"] == "text"))


class AllKnowing:
    """Knows the held-out examples' answers in the order in which they are asked, and follows along."""

    def __init__(self, tasks: tuple[str, ...], per_task: int) -> None:
        examples = [
            sample_example(HELD_OUT_SEEDS + 1_000_000 * number + index, task, listed_words=True)
            for number, task in enumerate(TASKS)
            if task in tasks
            for index in range(per_task)
        ]
        self.turns = iter([turn for example in examples for turn in example.turns])

    def __call__(self, conversations: Conversations) -> list[str]:
        answers = []
        for conversation in conversations:
            question, answer = next(self.turns)
            assert question_of(conversation) == question
            answers.append(f" {answer}\n")
        return answers


def test_right_answers_score_everything() -> None:
    steps: list[tuple[int, int]] = []
    tasks = tuple(TASKS)
    report = evaluate(AllKnowing(tasks, 6), per_task=6, progress=lambda done, total: steps.append((done, total)))
    assert list(report.tasks) == list(TASKS)
    assert all(result.accuracy == 1 and result.asked >= 6 and not result.mistakes for result in report.tasks.values())
    assert report.mean("core") == report.mean("further") == 1
    assert steps[-1][0] == steps[-1][1] == sum(result.asked for result in report.tasks.values())


def test_wrong_answers_score_nothing_and_are_kept() -> None:
    report = evaluate(lambda conversations: ["a plaid hexagon"] * len(conversations), per_task=2, tasks=("count",))
    (result,) = report.tasks.values()
    assert (result.asked, result.right, result.accuracy) == (2, 0, 0)
    mistake = result.mistakes[0]
    assert mistake.answer == "a plaid hexagon"
    example = sample_example(mistake.seed, "count", listed_words=True)
    assert example.turns == ((mistake.question, mistake.expected),)


def test_an_answer_must_be_exact() -> None:
    knows = AllKnowing(("describe",), 3)
    report = evaluate(lambda asked: [text.strip() + "." for text in knows(asked)], per_task=3, tasks=("describe",))
    assert report.tasks["describe"].right == 0


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        evaluate(lambda conversations: [], tasks=("juggling",))
    with pytest.raises(ValueError, match="got 0"):
        evaluate(lambda conversations: [], per_task=1, tasks=("count",))


@pytest.mark.parametrize("text_first", [False, True])
def test_messages_hold_images_once_with_earlier_answers(text_first: bool) -> None:
    scene = sample_scene(3, "one")
    turns = (("What is this?", "a red circle"), ("Where is it?", "top left"))
    messages = messages_of(Example("follow_up", (scene,), turns, "Be brief.", text_first), 1)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    kinds = [part["type"] for part in messages[1]["content"]]
    assert kinds == (["text", "image"] if text_first else ["image", "text"])
    (image,) = [part["image"] for part in messages[1]["content"] if part["type"] == "image"]
    assert isinstance(image, Image.Image)
    assert image.size == scene.size
    assert [messages[2]["content"], messages[3]["content"]] == ["a red circle", "Where is it?"]


def test_card_update_replaces_only_the_table(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text(CARD.read_text(encoding="utf-8"), encoding="utf-8")
    report = Report({task: TaskResult(asked=40, right=30 + n) for n, task in enumerate(TASKS)})
    write_card(card, report)
    first = card.read_text(encoding="utf-8")
    assert "| place | core | 40 | 75.0% |" in first
    write_card(card, report)
    assert card.read_text(encoding="utf-8") == first
    before = CARD.read_text(encoding="utf-8").partition("<!--")[0]
    assert first.startswith(before)
    card.write_text("no markers", encoding="utf-8")
    with pytest.raises(ValueError, match="no lines"):
        write_card(card, report)
