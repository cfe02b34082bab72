"""Documents: what they print, where, and what is asked about them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import numpy as np
import pytest
from jsonschema import validate
from PIL import ImageFont

from vlmserve.pixie import fonts
from vlmserve.pixie.document_drawing import draw_document
from vlmserve.pixie.documents import DOCUMENT_KINDS, LARGEST_SIDE, MOST_LINES, SMALLEST_SIDE, Style, sample_document
from vlmserve.pixie.fonts import document_fonts
from vlmserve.pixie.printed_text import CHARACTERS, price
from vlmserve.pixie.reading import DOCUMENT_TASKS, ask_document
from vlmserve.pixie.reading_evaluation import overlap

KINDS = ("page", *DOCUMENT_KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_give_equal_documents(kind):
    one, other = (sample_document(7, kind) for _ in range(2))
    assert one == other
    assert np.array_equal(np.asarray(draw_document(one)), np.asarray(draw_document(other)))
    assert draw_document(one).size == one.size


@pytest.mark.parametrize("kind", KINDS)
def test_lines_lie_inside_and_in_order(kind):
    for seed in range(12):
        document = sample_document(seed, kind)
        width, height = document.size
        assert min(width, height) >= SMALLEST_SIDE
        assert max(width, height) <= LARGEST_SIDE
        assert document.lines
        for line in document.lines:
            left, top, right, bottom = line.box
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
            assert len(line.boxes) == len(line.text)
            assert set(line.text) <= set(CHARACTERS) | {" "}
        starts = [(line.origin[1], line.origin[0]) for line in document.lines]
        assert starts == sorted(starts)
        assert kind not in ("lines", "sign") or len(document.lines) <= MOST_LINES


@pytest.mark.parametrize("new", [False, True])
def test_lines_never_overlap(new):
    for kind in KINDS:
        for seed in range(100, 130):
            boxes = [line.box for line in sample_document(seed, kind, style=Style(new=new)).lines]
            assert all(overlap(one, other) == 0 for one, other in itertools.combinations(boxes, 2))


def test_ink_covers_the_boxes_of_characters():
    for seed in range(6):
        document = sample_document(seed, "lines")
        document.background = type(document.background)("plain", (255, 255, 255), (255, 255, 255))
        document.noise, document.jpeg_quality = 0.0, None
        pixels = np.asarray(draw_document(document)).astype(int)
        for line in document.lines:
            for character, (left, top, right, bottom) in zip(line.text, line.boxes, strict=True):
                if character in "0123456789ABCDEFGHKLMNPRSTUVXZ" and line.colour != "white":
                    inside = pixels[round(top) : round(bottom), round(left) : max(round(right), round(left) + 1)]
                    assert (abs(inside - 255).sum(-1) > 60).any()


@pytest.mark.parametrize("kind", DOCUMENT_KINDS)
def test_descriptions_name_what_is_printed(kind):
    document = sample_document(5, kind)
    facts, question = document.facts, ask_document(document, random.Random(1), "describe")
    named = {
        "lines": document.lines[0].text,
        "sign": document.lines[-1].text,
        "receipt": str(facts.get("total")),
        "chart": str(facts.get("title")),
        "gauge": str(facts.get("value")),
    }
    assert question is not None
    assert named[kind] in question.answer


def test_documents_are_printed_in_added_fonts(tmp_path, monkeypatch):
    monkeypatch.setattr(fonts, "added_fonts", [])
    file = tmp_path / "some.ttf"
    file.write_bytes(ImageFont.load_default(10).font_bytes)
    assert fonts.add_document_fonts(tmp_path) == 1
    assert str(file) in document_fonts()
    monkeypatch.setattr(fonts, "added_fonts", [])
    monkeypatch.setattr(fonts, "CHARACTERS", fonts.CHARACTERS + "中")
    assert fonts.add_document_fonts(tmp_path) == 0, "a font without a character"
    assert str(file) not in document_fonts()


def test_held_out_fonts_are_never_trained_on():
    new = Style(new=True)
    for seed in range(10):
        used = {line.font for line in sample_document(seed, "page", (128, 128), new).lines}
        assert used <= set(document_fonts(new=True))
    assert not set(document_fonts(new=True)) & set(document_fonts()) or len(document_fonts()) == 1


def test_totals_are_the_sum_of_prices():
    for seed in range(20):
        facts = sample_document(seed, "receipt").facts
        cents = sum(round(100 * float(shown)) for _, shown in facts["items"])
        assert facts["total"] == price(cents)


def test_answers_are_printed_in_the_document():
    rng = random.Random(0)
    for kind, tasks in DOCUMENT_TASKS.items():
        for task in tasks:
            for new in (False, True):
                document = sample_document(rng.getrandbits(30), kind)
                question = ask_document(document, rng, task, new=new)
                if question is None or task in ("colour", "board", "describe"):
                    continue
                if question.schema is not None:
                    validate(json.loads(question.answer), json.loads(question.schema))
                elif task == "where":
                    left, top, right, bottom = json.loads(question.answer)
                    assert 0 <= left < right <= 100
                    assert 0 <= top <= bottom <= 100
                else:
                    printed = " ".join(line.text for line in document.lines)
                    assert all(line in printed for line in question.answer.split("\n"))


def test_new_phrasings_are_never_trained_on():
    def asked(*, new: bool) -> set[str]:
        rng = random.Random(1)
        document = sample_document(3, "receipt")
        return {ask_document(document, rng, "total", new=new).question for _ in range(40)}

    assert not asked(new=False) & asked(new=True)


def test_questions_quote_lines_as_printed():
    document = sample_document(3, "lines")
    document.lines[:] = [dataclasses.replace(document.lines[0], text="Colour picture?")]
    for seed in range(60):
        question = ask_document(document, random.Random(seed), "where")
        assert question is not None
        assert "Colour picture?" in question.question
