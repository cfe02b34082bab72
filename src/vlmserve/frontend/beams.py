"""Beam search: the likeliest answers as a whole, instead of the likeliest tokens one by one.

The rules are those of transformers' `generate(num_beams=…)`. Each beam's next token is a request of its own: the prefix
cache has what beams share and all of a beam but its last token, so a step computes one token for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from vlmserve.errors import InvalidRequestError, VLMServeError
from vlmserve.frontend.client import EngineClient, EngineStream
from vlmserve.types import EngineOutput, EngineRequest, FinishReason, Prompt, SamplingParams

Choices = Sequence[tuple[int, float]]
"""Token ids and log probabilities of what may come next, the likeliest first."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """What is searched for. width: beams that go on. length_penalty: scores are log probabilities divided by the
    length to the power of it. early_stopping: end as soon as `width` answers have ended."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


class Beam(NamedTuple):
    """An answer so far, and the log probability of all of it."""

    token_ids: tuple[int, ...]
    logprob: float


class Ended(NamedTuple):
    """A whole answer. token_ids: with the end token, if one ended it."""

    token_ids: tuple[int, ...]
    score: float


class Beams:
    """The state of a search. Feed `advance` with choices for each of `running` until it is `done`."""

    def __init__(self, search: BeamSearch, end_token_ids: frozenset[int], max_tokens: int, min_tokens: int = 0) -> None:
        self._search = search
        self.end_token_ids = end_token_ids
        self._max_tokens, self._min_tokens = max_tokens, min_tokens
        self.running = [Beam((), 0.0)]
        self.ended: list[Ended] = []
        """The best answers that have ended, the best first."""
        self.done = False

    @property
    def num_choices(self) -> int:
        """How many choices each beam needs, so that enough are left when all of the best end."""
        return max(2, 1 + len(self.end_token_ids)) * self._search.width

    def advance(self, choices: Sequence[Choices]) -> None:
        """Go one token further. choices: of each running beam, `num_choices` or all there are."""
        width = self._search.width
        length = len(self.running[0].token_ids) + 1
        candidates = [
            Beam((*beam.token_ids, token_id), beam.logprob + logprob)
            for beam, own in zip(self.running, choices, strict=True)
            for token_id, logprob in own
            if length > self._min_tokens or token_id not in self.end_token_ids
        ]
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


class BeamStream:
    """One of a search's answers as a stream of outputs, of which there is one. Closing any of them ends the search."""

    def __init__(self, search: asyncio.Task[list[EngineOutput]], place: int) -> None:
        self._search = search
        self._place = place
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineOutput:
        if self._ended:
            raise StopAsyncIteration
        outputs = await asyncio.shield(self._search)
        self._ended = True
        return outputs[self._place]

    def close(self) -> None:
        """Give up the search, unless it has ended."""
        self._ended = True
        self._search.cancel()


def first_request_id(request_id: str) -> str:
    """What the engine calls the first request of a search."""
    return f"{request_id}-0-0"


def start_beam_search(
    client: EngineClient, request: EngineRequest, search: BeamSearch, num_answers: int, max_logprobs: int
) -> list[BeamStream]:
    """The `num_answers` best answers to a request, the best first. max_logprobs: of the engine.

    Raises InvalidRequestError for what cannot be searched for; the streams raise what `EngineClient.submit` does.
    """
    params = request.params
    _check_params(params)
    beams = Beams(
        search,
        frozenset() if params.ignore_eos else frozenset([*client.info.end_token_ids, *params.stop_token_ids]),
        min(params.max_tokens or client.info.max_model_len, client.info.max_model_len - len(request.prompt.token_ids)),
        params.min_tokens,
    )
    if beams.num_choices > max_logprobs:
        raise InvalidRequestError(
            f"a search of {search.width} beams needs {beams.num_choices} alternatives of each token, and at most "
            f"{max_logprobs} are available; --max-logprobs sets how many",
            param="best_of",
        )
    task = asyncio.ensure_future(_search(client, request, beams, num_answers))
    # The streams are closed: nobody reads the error.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return [BeamStream(task, place) for place in range(num_answers)]


async def _search(client: EngineClient, request: EngineRequest, beams: Beams, num_answers: int) -> list[EngineOutput]:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=beams.num_choices)
    first: EngineOutput | None = None
    step = 0
    while not beams.done:
        asked = [
            EngineRequest(
                f"{request.request_id}-{step}-{number}",
                Prompt(request.prompt.token_ids + list(beam.token_ids), request.prompt.images, request.prompt.cross),
                params,
                request.cache_salt,
            )
            for number, beam in enumerate(beams.running)
        ]
        streams = await client.submit_together(asked)
        try:
            outputs = [await _only_output(stream) for stream in streams]
        finally:
            for stream in streams:
                stream.close()
        first = first or outputs[0]
        beams.advance([logprobs[0].top for output in outputs if (logprobs := output.logprobs) is not None])
        step += 1
    assert first is not None
    return [
        EngineOutput(
            f"{request.request_id}-{place}",
            *_without_end(ended.token_ids, beams),
            cached_tokens=first.cached_tokens,
            images_encoded=first.images_encoded if place == 0 else 0,
            timings=first.timings,
        )
        for place, ended in enumerate(beams.ended[:num_answers])
    ]


def _without_end(token_ids: tuple[int, ...], beams: Beams) -> tuple[list[int], FinishReason, int | None]:
    if token_ids[-1] in beams.end_token_ids:
        return list(token_ids[:-1]), "stop", token_ids[-1]
    return list(token_ids), "length", None


async def _only_output(stream: EngineStream) -> EngineOutput:
    async for output in stream:
        if output.finish_reason not in ("abort", "error"):
            return output
        raise VLMServeError(output.error or "The engine aborted this request")
    raise VLMServeError("The engine returned no output for a beam")


def _check_params(params: SamplingParams) -> None:
    """Raises InvalidRequestError, naming the field, for what a search has no use for."""
    neutral = SamplingParams(temperature=0)
    fields = (
        "logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty", "logprobs", "prompt_logprobs",
        "stop",
    )  # fmt: skip
    if params.grammar is not None:
        source = params.grammar.source
        raise InvalidRequestError(f"{source} cannot be combined with use_beam_search; leave it out", param=source)
    for name in fields:
        if getattr(params, name) != getattr(neutral, name):
            raise InvalidRequestError(f"{name} cannot be combined with use_beam_search; leave it out", param=name)
