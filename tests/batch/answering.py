"""Answers of a batch without a model: what a question is, in capitals."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from vlmserve.batch.answers import Ask
from vlmserve.batch.journal import Result
from vlmserve.server.schema.batches import BatchLine


class Shouting:
    """Answers in reverse order. asked: all texts. broken: those that get an error. delay: seconds before each."""

    name = "shouting"

    def __init__(self, broken: Sequence[str] = (), delay: float = 0.0) -> None:
        self.asked: list[str] = []
        self.broken, self._delay = broken, delay

    def answer(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Result]]:
        for number, ask in reversed([*enumerate(asks)]):
            messages = ask.body["messages"] if isinstance(ask, BatchLine) else ask.messages
            text = messages[-1]["content"][-1]["text"]
            self.asked.append(text)
            time.sleep(self._delay)
            yield number, Result(error="broken") if text in self.broken else Result(text.upper(), "stop")
