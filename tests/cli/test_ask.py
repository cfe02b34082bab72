"""Which words of a command line are files, and which is the question."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from vlmserve.cli.ask import Question
from vlmserve.errors import ConfigurationError, InvalidImageError


@pytest.fixture
def image(tmp_path: Path) -> str:
    path = tmp_path / "photo"
    path.write_bytes(b"")
    return str(path)


@pytest.mark.parametrize("words", [["{image}", "What is it?"], ["What is it?", "{image}"]])
def test_question_comes_first_or_last(image: str, words: list[str]) -> None:
    question = Question.read([word.format(image=image) for word in words])
    assert (question.text, len(question.media)) == ("What is it?", 1)


def test_dash_reads_the_question(image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is it?\n"))
    assert Question.read([image, "-"]).text == "What is it?"


def test_files_alone_are_no_question(image: str) -> None:
    assert Question.read([image, "https://example.org/a.png"]).text == ""


@pytest.mark.parametrize("name", ["missing.png", "missing.heic"])
def test_missing_image_is_no_question(name: str) -> None:
    with pytest.raises(InvalidImageError, match=name):
        Question.read([name])


def test_two_questions_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="quote a question of several words"):
        Question.read(["What", "is", "it?"])
