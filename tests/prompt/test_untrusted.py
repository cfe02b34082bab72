from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmserve.prompt.untrusted import ControlTokens, Quotation, find_all

TOKENS = ["<image>", "<|im_end|>", "</s>"]
CONTROL = ControlTokens(TOKENS)
PIECES = st.lists(st.sampled_from([*TOKENS, *"<>|/s_ \n", "im", "age", "end", "word"]), max_size=6).map("".join)


def test_ordinary_text_passes_untouched() -> None:
    quotation = Quotation(CONTROL)
    text = "  What is in the image?\n"
    assert quotation.quote(text) == text
    assert quotation.is_empty


@given(texts=st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=4), strips=st.booleans())
def test_no_control_token_survives_and_texts_are_restorable(texts: list[str], strips: bool) -> None:
    quotation = Quotation(CONTROL)
    quoted = [quotation.quote(text) for text in texts]
    if strips:
        texts, quoted = [text.strip() for text in texts], [text.strip() for text in quoted]
    joined = "".join(quoted)
    assert not any(token in joined for token in TOKENS)
    assert quotation.unquote(joined) == "".join(texts)


@pytest.mark.parametrize(
    "parts", [["<im", "age>"], ["<", "image", ">"], ["a <", "image", "> b"], ["<", "i", "mage>"], ["<im ", " age>"]]
)
def test_control_tokens_cannot_be_put_together_from_parts(parts: list[str]) -> None:
    quotation = Quotation(CONTROL)
    assert "<image>" not in "".join(quotation.quote(part).strip() for part in parts)


def test_codes_cannot_be_forged() -> None:
    quotation = Quotation(CONTROL)
    code = quotation.quote("<image>")
    forged = quotation.quote(code)
    assert code not in forged
    assert quotation.unquote(forged) == code


def test_quoted_spans_point_at_the_quoted_characters() -> None:
    quotation = Quotation(CONTROL)
    rendered = quotation.quote("a <image> b </s>c")
    plain = quotation.unquote(rendered)
    assert [plain[start:end] for start, end in quotation.quoted_spans(rendered)] == ["<image>", "</s>"]


def test_nothing_is_quoted_without_control_tokens() -> None:
    quotation = Quotation(ControlTokens([]))
    assert quotation.quote("<image>") == "<image>"


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["<image>", "<ima", "ge>", "x" * 16380, "x" * 7, "é"]), max_size=12).map("".join))
def test_windowed_search_equals_whole_search(text: str) -> None:
    pattern = re.compile(r"<image>|(?<!\w)x(?!\w)|<ima")
    expected = [match.span() for match in pattern.finditer(text)]
    assert [match.span() for match in find_all(pattern, text, len("<image>"))] == expected
