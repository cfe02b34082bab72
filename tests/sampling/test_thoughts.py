"""Where an answer stands in its thoughts."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from vlmserve.sampling.thoughts import Thinking
from vlmserve.types import Grammar, SamplingParams, Thoughts

START, END, BLANK, WORD = 0, 1, 2, 3
TOKENS = st.lists(st.sampled_from([START, END, BLANK, WORD]), max_size=12)


def letters(tokens: list[int]) -> str:
    return "".join("<> w"[token] for token in tokens)


@given(TOKENS, st.booleans())
def test_thoughts_are_what_stands_between_the_first_markers(tokens, begun):
    thinking = Thinking(Thoughts(START, END, begun, (BLANK,)))
    taken = []
    for place, token in enumerate(tokens):
        if thinking.takes(token):
            taken.append(place)
        thinking.append(token)
    # The oracle reads the whole answer at once.
    match = re.match(r"()[^>]*>?" if begun else r"( *)(?:<[^>]*>?)?", letters(tokens))
    assert match is not None
    assert taken == list(range(match.end(1), match.end()))
    assert thinking.is_over == (letters(tokens)[: match.end()].endswith(">") or match.end() < len(tokens))
    inside = [tokens[place] for place in taken if tokens[place] != END]
    assert thinking.num_tokens == len(inside) - (not begun and bool(taken))


@given(st.integers(0, 5), st.integers(1, 12), st.integers(0, 6), st.booleans())
def test_their_end_is_forced_in_time(budget, left, needed, begun):
    """A model that would think for ever: its thoughts stay within the budget, and leave room for the answer."""
    thinking = Thinking(Thoughts(START, END, begun), budget)
    room = left
    while room and not thinking.is_over:
        forced = thinking.forced(room, needed)
        if forced is not None:
            token = forced
        elif thinking.is_before:
            token = START if thinking.may_begin(room, needed) else WORD
        else:
            token = WORD
        is_thought = thinking.takes(token)
        thinking.append(token)
        room -= is_thought
    assert thinking.num_tokens <= budget
    if needed and left > needed + 2:
        assert room >= needed


def test_format_starts_at_the_answer_without_leading_space():
    thoughts = Thoughts(START, END, blank_ids=(BLANK,))
    for grammar, is_before in ((None, True), (Grammar("lark", "", source="tools"), True), (Grammar.regex("a"), False)):
        thinking = Thinking.of(thoughts, SamplingParams(grammar=grammar))
        assert thinking is not None
        thinking.append(BLANK)
        assert thinking.is_before == is_before
    assert Thinking.of(None, SamplingParams()) is None


def test_thoughts_begin_where_the_answer_has_room():
    thinking = Thinking(Thoughts(START, END))
    assert [thinking.may_begin(left, needed) for left, needed in ((9, 0), (1, 0), (9, 6), (8, 6))] == [
        True, True, True, False,
    ]  # fmt: skip
