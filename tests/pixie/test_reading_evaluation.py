"""The evaluation of reading: distances, boxes, and what counts as right."""

from __future__ import annotations

import json

import pytest

import vlmserve.pixie.reading_evaluation
from vlmserve.errors import ConfigurationError
from vlmserve.pixie.documents import Style
from vlmserve.pixie.reading import TOTAL_NAMES
from vlmserve.pixie.reading_evaluation import (
    EVALUATED,
    ReadingReport,
    edit_distance,
    evaluate_checkpoint,
    evaluate_reading,
    held_out_case,
    is_right,
    overlap,
)


@pytest.mark.parametrize(
    ("one", "other", "expected"), [("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("same", "same", 0)]
)
def test_edit_distance_counts_the_fewest_changes(one, other, expected):
    assert edit_distance(one, other) == expected


def test_overlap_is_intersection_over_union():
    assert overlap((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)
    assert overlap((0, 0, 1, 1), (2, 2, 3, 3)) == 0


def test_right_answers_score_in_full():
    report = evaluate_reading(lambda cases: [question.answer for _, question in cases], per_task=3)
    assert all(result.accuracy == 1 for result in report.tasks.values())
    assert report.line_accuracy == report.character_accuracy == 1
    assert "| characters |" in report.to_markdown()


def test_wrong_answers_score_nothing():
    report = evaluate_reading(lambda cases: ["~"] * len(cases), per_task=2)
    assert all(result.right == 0 for result in report.tasks.values())
    assert report.line_accuracy == 0


def test_a_wrong_character_costs_its_line_only():
    report = ReadingReport({})
    report.count_text("ab\ncd", "ab\ncx")
    assert report.line_accuracy == 0.5
    assert report.character_accuracy == pytest.approx(0.8)


def test_only_the_total_of_a_receipt_counts():
    _, question = held_out_case("receipt", 0, Style(new=True))
    answer = json.loads(question.answer)
    name = next(name for name in answer if name in TOTAL_NAMES)
    assert is_right(question, json.dumps({name: answer[name]}))
    assert not is_right(question, json.dumps(answer | {name: 0.5}))


@pytest.mark.parametrize("answer", ["", "7", "[1,2]", '{"box":[0,0,9,9]}', "[null,0,9,9]"])
def test_answers_without_a_box_are_wrong(answer):
    _, question = held_out_case("where", 0, Style(new=True))
    assert not is_right(question, answer)


def test_held_out_cases_are_the_same_each_time():
    for task in EVALUATED:
        assert held_out_case(task, 1, Style()) == held_out_case(task, 1, Style())


def test_evaluation_needs_fonts_that_training_lacks(monkeypatch):
    monkeypatch.setattr(vlmserve.pixie.reading_evaluation, "document_fonts", lambda *, new=False: ("Pillow",))
    with pytest.raises(ConfigurationError, match="not installed"):
        evaluate_checkpoint("pixie")
