"""What is told of an answer's tokens, whatever way they come in and however they end."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt.tokenizers_for_tests import byte_level
from vlmserve.prompt.detokenize import Detokenizer, token_bytes
from vlmserve.prompt.files import PromptFiles
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.server.generation import Answer, Piece
from vlmserve.types import EngineOutput, TokenLogprobs

FILES = PromptFiles(model_type="", tokenizer_config={}, special_tokens={}, image_token_id=None, chat_template=None)
TOKENIZER = Tokenizer(byte_level(), FILES)


class Stream:
    """An `EngineStream` of outputs that are known."""

    def __init__(self, outputs: list[EngineOutput]) -> None:
        self._outputs = iter(outputs)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> EngineOutput:
        output = next(self._outputs, None)
        if output is None:
            raise StopAsyncIteration
        return output

    def close(self) -> None:
        pass


class Record:
    def output(self, output: EngineOutput) -> None:
        pass

    def end(self, reason: str) -> None:
        pass


def answered(tokens: list[int], cuts: list[int], stop: list[str]) -> tuple[list[Piece], Answer]:
    """An answer whose tokens come in steps of these numbers, then one by one, and its pieces."""
    outputs, done = [], 0
    while done < len(tokens):
        count = cuts.pop() if cuts else 1
        part = tokens[done : done + count]
        told = [TokenLogprobs(token, -float(done + index), 1) for index, token in enumerate(part)]
        done += len(part)
        outputs.append(EngineOutput("a", part, "length" if done == len(tokens) else None, logprobs=told))

    async def collect() -> tuple[list[Piece], Answer]:
        answer: Any = Answer(0, Stream(outputs), Detokenizer(TOKENIZER, stop), Record())  # type: ignore[arg-type]
        return [piece async for piece in answer.pieces()], answer

    return asyncio.run(collect())


def pieces_of(tokens: list[int], cuts: list[int], stop: list[str]) -> list[Piece]:
    return answered(tokens, cuts, stop)[0]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size + 3), min_size=1, max_size=40),
    st.lists(st.integers(1, 6), max_size=10),
    st.sampled_from([[], ["e"], ["the", "ing "], ["never said"], ["\N{REPLACEMENT CHARACTER}a"]]),
)
def test_each_token_is_told_once_in_order_up_to_the_end_of_the_text(tokens, cuts, stop):
    pieces = pieces_of(tokens, cuts, stop)
    told = [one for piece in pieces for one in piece.told]
    assert [one.logprobs.token_id for one in told] == tokens[: len(told)]
    assert [one.logprobs.logprob for one in told] == [-float(place) for place in range(len(told))]
    shown = ""
    for piece in pieces:
        assert all(one.offset < len(shown + piece.text) or piece.finish_reason for one in piece.told)
        shown += piece.text
    if pieces[-1].stop_string is None:
        assert len(told) == len(tokens)
    else:
        assert all(one.offset < len(shown) for one in told)
        decoded = Detokenizer(TOKENIZER)
        assert decoded.push(tokens[: len(told)]).startswith(shown)
        before = Detokenizer(TOKENIZER)
        assert not told or len(before.push(tokens[: len(told) - 1])) < len(shown)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 6), max_size=10), st.sampled_from(["cat", "the ", "zebra", "dog"]))
def test_usage_counts_the_tokens_up_to_a_stop_string_in_whatever_steps_they_come(cuts, stop):
    tokens = TOKENIZER.encode("the cat and the dog", add_special_tokens=False)
    pieces, answer = answered(tokens, cuts, [stop])
    reference = Detokenizer(TOKENIZER, [stop])
    needed = 0
    while needed < len(tokens) and not reference.stopped:
        reference.push([tokens[needed]])
        needed += 1
    assert answer.num_tokens == needed
    assert (pieces[-1].stop_string is None) == (stop == "zebra")


def test_tokens_of_one_character_are_told_with_it():
    tokens = TOKENIZER.encode("a\N{PARTY POPPER}", add_special_tokens=False)
    assert b"".join(map(token_bytes(TOKENIZER), tokens)) == "a\N{PARTY POPPER}".encode()
    [letter, image, end] = pieces_of([*tokens, tokens[0]], [], [])
    assert (letter.text, len(letter.told)) == ("a", 1)
    assert (image.text, len(image.told)) == ("\N{PARTY POPPER}", len(tokens) - 1)
    assert (end.text, len(end.told), end.finish_reason) == ("a", 1, "length")
