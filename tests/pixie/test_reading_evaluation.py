"""The evaluation of reading: distances, boxes, and what counts as right."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from vlmserve.pixie import fonts
from vlmserve.pixie.documents import Style
from vlmserve.pixie.questions import READING_TASKS
from vlmserve.pixie.reading import TOTAL_NAMES
from vlmserve.pixie.reading_evaluation import (
    edit_distance,
    evaluate_reading,
    held_out_case,
    is_right,
    overlap,
)


class Answers:
    """Gives answers in place of a model."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    def chat(self, conversations, params, *, use_tqdm):
        taken = [self.texts.pop(0) for _ in conversations]
        return [SimpleNamespace(outputs=[SimpleNamespace(text=text, finish_reason="stop")]) for text in taken]


def right_answers(tasks, count):
    return [held_out_case(task, number, Style(new=True))[1].answer for task in tasks for number in range(count)]


@pytest.mark.parametrize(
    ("one", "other", "expected"), [("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("same", "same", 0)]
)
def test_edit_distance_counts_the_fewest_changes(one, other, expected):
    assert edit_distance(one, other) == expected


def test_overlap_is_intersection_over_union():
    assert overlap((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)
    assert overlap((0, 0, 1, 1), (2, 2, 3, 3)) == 0


def test_right_answers_score_in_full():
    results = evaluate_reading(Answers(*right_answers(READING_TASKS, 3)), per_task=3)
    assert list(results) == [*READING_TASKS, "line", "character"]
    assert all(result.accuracy == 1 and not result.mistakes for result in results.values())


def test_wrong_answers_score_nothing():
    results = evaluate_reading(Answers(*["~"] * 2 * len(READING_TASKS)), per_task=2)
    assert all(result.right == 0 for task, result in results.items() if task != "character")
    assert len(results["total"].mistakes) == 2


def test_a_wrong_character_costs_its_line_only():
    texts = right_answers(["text"], 6)
    number = next(number for number, text in enumerate(texts) if "\n" in text)
    texts[number] = "~" + texts[number][1:]
    results = evaluate_reading(Answers(*texts), per_task=6, tasks=["text"])
    assert results["text"].right == 5
    assert results["line"].asked - results["line"].right == 1
    assert results["character"].asked - results["character"].right == 1


def test_only_the_total_of_a_receipt_counts():
    _, question = held_out_case("receipt", 0, Style(new=True))
    answer = json.loads(question.answer)
    name = next(name for name in answer if name in TOTAL_NAMES)
    assert is_right(question, json.dumps({name: answer[name]}))
    assert not is_right(question, json.dumps(answer | {name: 0.5}))


@pytest.mark.parametrize("answer", ["", "7", "[1,2]", '{"box":[0,0,9,9]}', "[null,0,9,9]"])
def test_answers_without_a_box_are_wrong(answer):
    _, question = held_out_case("box", 0, Style(new=True))
    assert not is_right(question, answer)


def test_held_out_cases_are_the_same_each_time():
    for task in READING_TASKS:
        assert held_out_case(task, 1, Style()) == held_out_case(task, 1, Style())


def test_any_missing_held_out_font_counts(tmp_path, monkeypatch):
    (tmp_path / "held_out.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fonts, "HELD_OUT_FONTS", {"held_out": ("one.ttf", "two.ttf")})
    (tmp_path / "one.ttf").touch()
    assert fonts.held_out_fonts_are_missing()
    (tmp_path / "two.ttf").touch()
    assert not fonts.held_out_fonts_are_missing()
