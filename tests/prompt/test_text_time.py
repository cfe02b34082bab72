"""Texts that take quadratic time to tokenize."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from tests.prompt.test_patterns import PUBLISHED
from tests.prompt.tokenizers_for_tests import byte_level, write_checkpoint
from vlmserve.errors import InvalidRequestError
from vlmserve.prompt import text_time
from vlmserve.prompt.text_time import SHORT_TEXT, check_time, is_quadratic
from vlmserve.prompt.tokenizer import Tokenizer


class Clock:
    """A tokenizer's CPU time: linear, and quadratic for runs of "1"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, linear: float, quadratic: float) -> None:
        self.now, self._linear, self._quadratic = 0.0, linear, quadratic
        monkeypatch.setattr(text_time.time, "thread_time", lambda: self.now)

    def cost(self, text: str) -> float:
        runs = (len(list(run)) for character, run in itertools.groupby(text) if character == "1")
        return self._linear * len(text) + self._quadratic * sum(run**2 for run in runs)

    def encode(self, text: str) -> None:
        self.now += self.cost(text)


@given(
    runs=st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 60_000)), max_size=4),
    quadratic=st.sampled_from([0.0, 1e-11, 1e-10, 1e-9, 1e-8]),
)
@settings(deadline=None, max_examples=200)
def test_accepted_text_and_its_check_take_bounded_time(runs: list[tuple[int, int]], quadratic: float) -> None:
    text = "".join("1" * digits + "a" * letters for digits, letters in runs)
    allowed = max(text_time.MIN_SECONDS, len(text) * text_time.SECONDS_PER_CHARACTER)
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch, 1e-6, quadratic)
        try:
            check_time(clock.encode, text)
        except InvalidRequestError:
            assert clock.cost(text) > allowed / 16, "such a text is not slow"
        else:
            assert len(text) <= SHORT_TEXT or clock.cost(text) <= text_time.GROWTH * allowed
        largest_piece = 1e-6 * len(text) + quadratic * len(text) ** 2
        num_levels = 8
        assert clock.now <= num_levels * allowed + min(largest_piece, 2 * allowed)


@pytest.mark.parametrize(("quadratic", "expected"), [(0.0, False), (1e-8, True)])
def test_quadratic_time_is_noticed(monkeypatch: pytest.MonkeyPatch, quadratic: float, expected: bool) -> None:
    assert is_quadratic(Clock(monkeypatch, 5e-6, quadratic).encode) is expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a published pattern that is quadratic in runs of digits."""
    backend = byte_level()
    split = pre_tokenizers.Split(Regex(PUBLISHED["SuperBPE"]), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    return Path(write_checkpoint(tmp_path_factory.mktemp("digits"), backend))


@pytest.fixture(scope="module")
def digits(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("how", ["whole", "counted"])
def test_long_run_of_digits_is_rejected(digits: Tokenizer, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check this takes half a minute."""
    monkeypatch.setattr(text_time, "MIN_SECONDS", 0.2)
    monkeypatch.setattr(text_time, "SECONDS_PER_CHARACTER", 2e-6)
    text = "1" * 60_000
    tokenize = digits.encode if how == "whole" else lambda text: digits.check_length([text], 1000)
    with pytest.raises(InvalidRequestError, match="break up its long runs of similar characters"):
        tokenize(text)


def test_ordinary_long_text_has_the_same_tokens(
    folder: Path, digits: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "In 2024, 1234567 people paid 89.90 for it. " * 500
    checked: list[Any] = []
    monkeypatch.setattr(
        "vlmserve.prompt.tokenizer.check_time", lambda *arguments: checked.append(check_time(*arguments))
    )
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert digits.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids
    assert checked
