"""Log-probabilities of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vlmserve.models.protocols import LanguageModel
from vlmserve.runner.adapters import RunnerAdapters
from vlmserve.runner.requests import ScheduledRequest
from vlmserve.sampling.logprobs import MAX_LOGITS, token_logprobs
from vlmserve.types import TokenLogprobs


def score_prompts(
    batch: Sequence[ScheduledRequest], hidden: Tensor, model: LanguageModel, adapters: RunnerAdapters | None = None
) -> dict[str, list[TokenLogprobs | None]]:
    """Return log-probabilities of prompt tokens after a step's tokens, if requested.

    hidden: ``[tokens, hidden_size]``.
    """
    scores = {}
    row = 0
    for request in batch:
        state = request.state
        if (first := state.num_scored) is not None:
            if adapters is not None:
                adapters.use_for_all(state.adapter)
            scored = _score_prompt(request, first, hidden[row : row + request.num_tokens], model)
            scores[state.request_id] = scored
            known = first + len(scored)
            state.num_scored = known if known < state.num_prompt_tokens else None
        row += request.num_tokens
    return scores


def _score_prompt(
    request: ScheduledRequest, first: int, hidden: Tensor, model: LanguageModel
) -> list[TokenLogprobs | None]:
    """first: the first token without log-probabilities."""
    state, start = request.state, request.start
    end = min(start + request.num_tokens + 1, state.num_prompt_tokens)
    of_images = {place for image in state.images_between(first, end) for place in range(image.start, image.end)}
    places = [place for place in range(first, end) if place not in of_images]
    at_once = max(1, MAX_LOGITS // model.vocab_size)
    scores: dict[int, TokenLogprobs] = {}
    for some in (places[begin : begin + at_once] for begin in range(0, len(places), at_once)):
        logits = model.logits(hidden[[place - 1 - start for place in some]])
        followers = [state.token_ids[place] for place in some]
        num_top = [state.params.prompt_logprobs or 0] * len(some)
        scores.update(zip(some, token_logprobs(logits, followers, num_top), strict=True))
    return [scores.get(place) for place in range(first, end)]
