"""Random texts of known token counts, by the server's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

ANCHOR = "the"
"""First word of every text. A word without a space before it may have other tokens, so it is counted separately."""

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body "
    "information back parent face others level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education and you that it he was for on are as with his they "
    "at be this have from or one had by not but what all were we when your can said there use an each which she do "
    "how their if will up other about out many then them these so some her would make like him into has look two "
    "more write go see no could my than first been call who now find long down did get come made may red blue"
).split()


@dataclass(frozen=True)
class Vocabulary:
    costs: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(WORDS, 1.0))
    """Tokens of a word with a space before it."""
    anchor: float = 1.0
    """Tokens of the first word."""
    is_exact: bool = False
    """True if the server's tokenizer counted each word; False for a mean."""

    @cached_property
    def _words(self) -> list[str]:
        return list(self.costs)

    @cached_property
    def _tokens(self) -> np.ndarray:
        return np.array([self.costs[word] for word in self._words])

    @cached_property
    def _fillers(self) -> list[str]:
        """One word per token count, largest first."""
        by_cost = {cost: word for word, cost in sorted(self.costs.items(), reverse=True)}
        return [by_cost[cost] for cost in sorted(by_cost, reverse=True)]

    def text(self, draw: np.random.Generator, num_tokens: int) -> tuple[str, float]:
        """Random words of about `num_tokens` tokens, never more, and their tokens."""
        room = num_tokens - self.anchor
        drawn = draw.integers(len(self._words), size=int(max(room, 0) / self._tokens.min()) + 1)
        spent = np.cumsum(self._tokens[drawn])
        count = int(np.searchsorted(spent, room + 1e-9, side="right"))
        words = [ANCHOR, *(self._words[place] for place in drawn[:count])]
        total = self.anchor + (float(spent[count - 1]) if count else 0.0)
        for word in self._fillers:
            while total + self.costs[word] <= num_tokens + 1e-9:
                words.append(word)
                total += self.costs[word]
        return " ".join(words), total
