"""Answers of a batch without a model: what a question is, in capitals."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from vlmserve.batch.answers import Conversation
from vlmserve.batch.journal import Result
from vlmserve.types import SamplingParams


class Shouting:
    """Answers in reverse order. asked: all texts. broken: those that get an error. delay: seconds before each."""

    name = "shouting"

    def __init__(self, broken: Sequence[str] = (), delay: float = 0.0) -> None:
        self.asked: list[str] = []
        self.broken, self._delay = broken, delay

    def answer(self, conversations: Sequence[Conversation], params: SamplingParams) -> Iterator[tuple[int, Result]]:
        for number, conversation in reversed([*enumerate(conversations)]):
            text = conversation[-1]["content"][-1]["text"]
            self.asked.append(text)
            time.sleep(self._delay)
            yield number, Result(error="broken") if text in self.broken else Result(text.upper(), "stop")
