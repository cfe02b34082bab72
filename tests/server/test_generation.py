"""The logprobs of an answer's tokens, however they arrive and however the answer ends."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt.tokenizers_for_tests import byte_level
from vlmserve.frontend.reasoning import AnswerText
from vlmserve.prompt.detokenize import Detokenizer, token_bytes
from vlmserve.prompt.files import PromptFiles
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.server.generation import Answer, GenerationRequest, TextDelta
from vlmserve.types import EngineOutput, SamplingParams, TokenLogprobs

FILES = PromptFiles(tokenizer_config={}, special_tokens={}, image_token_id=None, chat_template=None)
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


def answered(tokens: list[int], cuts: list[int], stop: list[str]) -> tuple[list[TextDelta], Answer]:
    """An answer whose tokens come in steps of these numbers, then one by one, and its deltas."""
    outputs, done = [], 0
    while done < len(tokens):
        count = cuts.pop() if cuts else 1
        part = tokens[done : done + count]
        logprobs = [TokenLogprobs(token, -float(done + index), 1) for index, token in enumerate(part)]
        done += len(part)
        outputs.append(EngineOutput("a", part, "length" if done == len(tokens) else None, logprobs=logprobs))

    asked = GenerationRequest([], SamplingParams())

    async def collect() -> tuple[list[TextDelta], Answer]:
        answer: Any = Answer(0, Stream(outputs), AnswerText(Detokenizer(TOKENIZER, stop)), Record(), asked)  # type: ignore[arg-type]
        return [delta async for delta in answer.deltas()], answer

    return asyncio.run(collect())


def deltas_of(tokens: list[int], cuts: list[int], stop: list[str]) -> list[TextDelta]:
    return answered(tokens, cuts, stop)[0]


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size + 3), min_size=1, max_size=40),
    st.lists(st.integers(1, 6), max_size=10),
    st.sampled_from([[], ["e"], ["the", "ing "], ["never said"], ["\N{REPLACEMENT CHARACTER}a"]]),
)
def test_tokens_are_reported_once_in_order(tokens, cuts, stop):
    deltas = deltas_of(tokens, cuts, stop)
    logprobs = [one for delta in deltas for one in delta.logprobs]
    assert [one.logprobs.token_id for one in logprobs] == tokens[: len(logprobs)]
    assert [one.logprobs.logprob for one in logprobs] == [-float(place) for place in range(len(logprobs))]
    shown = ""
    for delta in deltas:
        assert all(one.offset < len(shown + delta.text) or delta.finish_reason for one in delta.logprobs)
        shown += delta.text
    if deltas[-1].stop_string is None:
        assert len(logprobs) == len(tokens)
    else:
        assert all(one.offset < len(shown) for one in logprobs)
        decoded = Detokenizer(TOKENIZER)
        assert decoded.push(tokens[: len(logprobs)]).startswith(shown)
        before = Detokenizer(TOKENIZER)
        assert not logprobs or len(before.push(tokens[: len(logprobs) - 1])) < len(shown)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 6), max_size=10), st.sampled_from(["cat", "the ", "zebra", "dog"]))
def test_usage_stops_at_the_stop_string(cuts, stop):
    tokens = TOKENIZER.encode("the cat and the dog", add_special_tokens=False)
    deltas, answer = answered(tokens, cuts, [stop])
    reference = Detokenizer(TOKENIZER, [stop])
    needed = 0
    while needed < len(tokens) and not reference.stopped:
        reference.push([tokens[needed]])
        needed += 1
    assert answer.num_tokens == needed
    assert (deltas[-1].stop_string is None) == (stop == "zebra")


def test_tokens_of_one_character_are_told_with_it():
    tokens = TOKENIZER.encode("a\N{PARTY POPPER}", add_special_tokens=False)
    assert b"".join(map(token_bytes(TOKENIZER), tokens)) == "a\N{PARTY POPPER}".encode()
    [letter, image, end] = deltas_of([*tokens, tokens[0]], [], [])
    assert (letter.text, len(letter.logprobs)) == ("a", 1)
    assert (image.text, len(image.logprobs)) == ("\N{PARTY POPPER}", len(tokens) - 1)
    assert (end.text, len(end.logprobs), end.finish_reason) == ("a", 1, "length")
