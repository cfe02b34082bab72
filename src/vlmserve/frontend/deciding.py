"""Questions about the same content, their possible answers, and the probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import numpy.typing as npt

from vlmserve.errors import InvalidRequestError
from vlmserve.prompt.untrusted import Quotation
from vlmserve.tasks import Score
from vlmserve.types import Prompt

if TYPE_CHECKING:
    from vlmserve.frontend.requests import RequestPreparer

Parts = list[dict[str, Any]]
_ENDS: WeakKeyDictionary[RequestPreparer, list[int]] = WeakKeyDictionary()


class Question(NamedTuple):
    parts: Parts
    """Parts of a user's message."""
    rule: str
    """How to answer."""
    answers: Sequence[str]
    rule_first: bool = False
    """Put the rule before the parts, so that questions with the same rule share a longer prefix."""

    @classmethod
    def predicate(cls, instructions: str | Parts) -> Question:
        """Ask whether a statement is true: Yes or No."""
        rule = "Is the following statement true? Answer only Yes or No."
        return cls(_as_parts(instructions), rule, ("Yes", "No"), rule_first=True)

    @classmethod
    def choice(
        cls, instructions: str | Parts, answers: Sequence[str], about: Sequence[str | None] | None = None
    ) -> Question:
        """about: a description of each answer."""
        rule = f"Answer only with one of these choices:\n{_described(answers, about)}"
        return cls(_as_parts(instructions), rule, answers)

    @classmethod
    def score(
        cls, instructions: str | Parts, levels: Sequence[str], about: Sequence[str | None] | None = None
    ) -> Question:
        """levels: lowest first. about: a description of each."""
        rule = f"Answer only with one of these levels, lowest first:\n{_described(levels, about)}"
        return cls(_as_parts(instructions), rule, levels)

    def after(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        rule = [{"type": "text", "text": self.rule}]
        return asked(messages, [*rule, *self.parts] if self.rule_first else [*self.parts, *rule])


def _as_parts(instructions: str | Parts) -> Parts:
    return [{"type": "text", "text": instructions}] if isinstance(instructions, str) else instructions


def _described(answers: Sequence[str], about: Sequence[str | None] | None) -> str:
    pairs = zip(answers, about or [None] * len(answers), strict=True)
    return "\n".join(f"- {answer}" if text is None else f"- {answer}: {text}" for answer, text in pairs)


class Decider:
    """Tokenizes answers as the model itself would write them."""

    def __init__(self, preparer: RequestPreparer) -> None:
        """Raises InvalidRequestError for a model without chat template or language model head."""
        made = preparer.vectors.instead_of_text
        if made is not None:
            raise InvalidRequestError(f"this model cannot decide: it makes {made}; serve a chat model", param="model")
        if not preparer.takes_tools:
            raise InvalidRequestError(
                "this model cannot decide: it needs a chat template; serve a chat model", param="model"
            )
        self.temperature = preparer.decision_temperature
        """Divides the log probabilities of answers."""
        self._tokenizer = preparer.tokenizer
        self._quotation = Quotation(preparer.tokenizer.control_tokens)
        self._end = _end_of_turn(preparer)
        self._tasks: dict[tuple[str, ...], Score] = {}

    def task(self, answers: Sequence[str]) -> Score:
        """Score each answer including the token that ends it."""
        key = tuple(answers)
        if key not in self._tasks:
            self._tasks[key] = self._task(key)
        return self._tasks[key]

    def _task(self, answers: Sequence[str]) -> Score:
        tails = [self._tokenizer.encode_quoted(self._quotation.quote(answer), self._quotation) for answer in answers]
        return Score(tuple((*tail, *self._end) for tail in tails))


def _end_of_turn(preparer: RequestPreparer) -> list[int]:
    """The token that the chat template writes after an answer, else the tokenizer's end token."""
    if preparer not in _ENDS:
        _ENDS[preparer] = _rendered_end(preparer)
    return _ENDS[preparer]


def _rendered_end(preparer: RequestPreparer) -> list[int]:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    begun = preparer.chat(messages, add_generation_prompt=False, continue_final_message=True).token_ids
    whole = preparer.chat(messages, add_generation_prompt=False).token_ids
    if len(whole) > len(begun) and whole[: len(begun)] == begun:
        return [whole[len(begun)]]
    end = preparer.tokenizer.special_tokens.get("eos_token")
    return [] if end is None else preparer.encode(end, add_special_tokens=False)


def answers_as_text(values: Sequence[str | bool]) -> list[str]:
    """Write choices so that the string "true" differs from true."""
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return texts if len(set(texts)) == len(texts) else [json.dumps(value) for value in values]


def asked(messages: Sequence[Mapping[str, Any]], question: Parts) -> list[dict[str, Any]]:
    """Append a question: to the last message if it is the user's, else as a new message."""
    shown = [dict(message) for message in messages]
    if shown and shown[-1]["role"] == "user":
        last = shown.pop()["content"]
        question = [*([{"type": "text", "text": last}] if isinstance(last, str) else last), *question]
    if all(part["type"] == "text" for part in question):
        return [*shown, {"role": "user", "content": "\n\n".join(part["text"] for part in question)}]
    spaced = [
        {**part, "text": f"{part['text']}\n\n"} if part["type"] == after["type"] == "text" else part
        for part, after in pairwise([*question, {"type": ""}])
    ]
    return [*shown, {"role": "user", "content": spaced}]


def with_shared(prompts: Sequence[Prompt]) -> tuple[Prompt | None, list[Prompt]]:
    """Return the shared prefix, and the prompts with its length."""
    shared = shared_prefix(prompts) if len(prompts) > 1 else None
    count = 0 if shared is None else len(shared.token_ids)
    return shared, [msgspec.structs.replace(prompt, thoughts=None, num_shared=count) for prompt in prompts]


def shared_prefix(prompts: Sequence[Prompt]) -> Prompt | None:
    """None if it is empty."""
    first = prompts[0]
    if any(prompt.cross != first.cross for prompt in prompts):
        return None
    length = len(first.token_ids)
    for prompt in prompts[1:]:
        pairs = enumerate(zip(first.token_ids[:length], prompt.token_ids, strict=False))
        length = next((place for place, (ours, theirs) in pairs if ours != theirs), min(length, len(prompt.token_ids)))
    for number, span in enumerate(first.images):
        same = all(
            len(prompt.images) > number
            and (prompt.images[number].start, prompt.images[number].image.key) == (span.start, span.image.key)
            for prompt in prompts
        )
        if span.end > length or not same:
            length = min(length, span.start)
            break
    if length == 0:
        return None
    images = tuple(span for span in first.images if span.end <= length)
    return msgspec.structs.replace(first, token_ids=first.token_ids[:length], images=images, thoughts=None)


def probabilities(result: npt.NDArray[np.float32], temperature: float = 1.0) -> list[float]:
    """Normalize the probabilities of the answers to one question. result: log probabilities of `Decider.task`."""
    sums = [value / temperature for value in result.tolist()]
    most = max(sums)
    weights = [math.exp(value - most) for value in sums]
    total = sum(weights)
    return [weight / total for weight in weights]


def confidence(distribution: Sequence[float]) -> float:
    """Return 1 for a certain answer, 0 for equally probable answers: `1 - entropy / ln(n)`."""
    values = np.array(distribution)
    entropy = -float((values * np.log(values, where=values > 0, out=np.zeros_like(values))).sum())
    return min(1.0, max(0.0, 1 - entropy / float(np.log(len(values)))))
