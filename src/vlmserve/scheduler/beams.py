"""Beam search, as transformers' `generate(num_beams=…)`. Beams share their parents' KV blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from vlmserve.sampling.bad_words import BadWords
from vlmserve.types import BeamAnswer, BeamSearch, EngineOutput, EngineRequest, FinishReason, Missed, SamplingParams

Choices = Sequence[tuple[int, float]]
"""Next token ids and their log probabilities, most likely first."""


class Beam(NamedTuple):
    """parent: index of the extended beam."""

    token_ids: tuple[int, ...]
    logprob: float
    parent: int = 0


class Ended(NamedTuple):
    """token_ids: with the end token, if any."""

    token_ids: tuple[int, ...]
    score: float


class Beams:
    """Call `advance` with choices for each of `running` until `done`."""

    def __init__(
        self,
        search: BeamSearch,
        end_token_ids: frozenset[int],
        max_tokens: int,
        min_tokens: int = 0,
        bad_words: Sequence[Sequence[int]] = (),
        allowed: Sequence[int] | None = None,
    ) -> None:
        self._search = search
        self._bad_words, self._num_bad = BadWords(bad_words), len(bad_words)
        self._allowed = allowed
        self.end_token_ids = end_token_ids
        self._max_tokens, self._min_tokens = max_tokens, min_tokens
        self.running = [Beam((), 0.0)]
        self.ended: list[Ended] = []
        """Best first."""
        self.done = False

    @classmethod
    def start(cls, request: EngineRequest, model_end_token_ids: Iterable[int], most: int) -> Self:
        """most: tokens that fit into the context."""
        assert request.beams is not None
        params = request.params
        ends = request.beams.end_token_ids(params, model_end_token_ids)
        most = min(params.max_tokens or most, most)
        return cls(request.beams, ends, most, params.min_tokens, params.bad_token_ids, params.allowed_token_ids)

    @property
    def num_choices(self) -> int:
        """Each bad word may need one more."""
        return self._search.num_choices(len(self.end_token_ids)) + self._num_bad

    def advance(self, choices: Sequence[Choices]) -> None:
        """choices: for each running beam, `num_choices` or all."""
        width = self._search.width
        length = len(self.running[0].token_ids) + 1
        bad = [self._bad_words.completing(list(beam.token_ids)) for beam in self.running]
        candidates = [
            Beam((*beam.token_ids, token_id), beam.logprob + logprob, place)
            for place, (beam, own) in enumerate(zip(self.running, choices, strict=True))
            for token_id, logprob in own
            if length > self._min_tokens or token_id not in self.end_token_ids
        ]
        # allowed tokens win over bad words
        candidates = [beam for beam in candidates if beam.token_ids[-1] not in bad[beam.parent]] or candidates
        best = sorted(candidates, key=lambda beam: -beam.logprob)[: self.num_choices]
        at_the_end = length == self._max_tokens
        ending = [beam for beam in best[:width] if at_the_end or beam.token_ids[-1] in self.end_token_ids]
        if not (self._search.early_stopping and len(self.ended) == width):
            scored = [Ended(beam.token_ids, self._score(beam.logprob, length)) for beam in ending]
            self.ended = sorted(self.ended + scored, key=lambda ended: -ended.score)[:width]
        self.running = [] if at_the_end else [b for b in best if b.token_ids[-1] not in self.end_token_ids][:width]
        self.done = not self.running or (len(self.ended) == width and self._cannot_improve(length))

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._search.length_penalty)

    def _cannot_improve(self, length: int) -> bool:
        return self._search.early_stopping or self._score(self.running[0].logprob, length) <= self.ended[-1].score

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0, ignore_eos=True, logprobs=self.num_choices, logprob_token_ids=self._allowed
        )

    def answers(self) -> list[BeamAnswer]:
        return [BeamAnswer(*self._without_end(ended.token_ids)) for ended in self.ended]

    def _without_end(self, token_ids: tuple[int, ...]) -> tuple[list[int], FinishReason, int | None]:
        if token_ids[-1] in self.end_token_ids:
            return list(token_ids[:-1]), "stop", token_ids[-1]
        return list(token_ids), "length", None

    def output(
        self, request_id: str, cached_tokens: int = 0, images_encoded: int = 0, missed: Missed | None = None
    ) -> EngineOutput:
        answers = self.answers()
        best = answers[0]
        return EngineOutput(
            request_id,
            best.token_ids,
            best.finish_reason,
            best.stop_token_id,
            cached_tokens=cached_tokens,
            images_encoded=images_encoded,
            beams=answers,
            missed=missed,
        )
